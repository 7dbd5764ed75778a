r"""Train with a data-parallel loop of mindnlp_dp: loop_mindspore.py with the lines marked "changed".

    mindnlp-dp run --nproc 2 homework/loop_mindnlp_dp.py
    msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --log_dir=logs/loop --join=True \
        homework/loop_mindnlp_dp.py

A small dense net predicts the language of a phrase from the counts of its letter pairs. Each of two processes reads
every second sample. The gradient exchange makes them train one model, even if their last batches differ in length.
"""

import mindspore
from mindspore import nn, ops
from phrases import NUM_FEATURES, NUM_LABELS, accuracy, batches_of_this_rank

import mindnlp_dp as dp  # changed

EPOCHS, BATCH_SIZE = 4, 64

dp.init_process_group()  # changed
mindspore.set_seed(1)

network = nn.SequentialCell(nn.Dense(NUM_FEATURES, 128), nn.ReLU(), nn.Dense(128, NUM_LABELS))
optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.5, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()


def forward_fn(features, labels):
    return loss_fn(network(features), labels)


dp.broadcast_parameters(network)  # changed
step = dp.make_train_step(forward_fn, optimizer, optimizer.parameters)  # changed

for epoch in range(EPOCHS):
    for number, batch in enumerate(batches_of_this_rank(epoch, BATCH_SIZE)):
        loss = step(batch)
        if number % 10 == 0:
            print(f"epoch {epoch}, batch {number}: loss {loss:.4f}", flush=True)

total = sum(float(ops.ReduceSum()(parameter).asnumpy()) for parameter in network.trainable_params())
print(f"accuracy {accuracy(network):.4f}, sum of the weights {total:.6f}", flush=True)
