r"""Train with a data-parallel loop as in MindSpore's documentation: value_and_grad and DistributedGradReducer.

    msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --log_dir=logs/loop --join=True \
        homework/loop_mindspore.py

A small dense net predicts the language of a phrase from the counts of its letter pairs. Each of two processes reads
every second sample; the gradient reducer makes them train one model.
"""

import mindspore
from mindspore import nn, ops
from mindspore.communication import init
from phrases import NUM_FEATURES, NUM_LABELS, accuracy, batches_of_this_rank

EPOCHS, BATCH_SIZE = 4, 64

init()
mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
mindspore.set_seed(1)

network = nn.SequentialCell(nn.Dense(NUM_FEATURES, 128), nn.ReLU(), nn.Dense(128, NUM_LABELS))
optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.5, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()


def forward_fn(features, labels):
    return loss_fn(network(features), labels)


grad_fn = mindspore.value_and_grad(forward_fn, None, network.trainable_params())
grad_reducer = nn.DistributedGradReducer(optimizer.parameters)


def step(batch):
    loss, gradients = grad_fn(*batch)
    optimizer(grad_reducer(gradients))
    return float(loss.asnumpy())


for epoch in range(EPOCHS):
    for number, batch in enumerate(batches_of_this_rank(epoch, BATCH_SIZE)):
        loss = step(batch)
        if number % 10 == 0:
            print(f"epoch {epoch}, batch {number}: loss {loss:.4f}", flush=True)

total = sum(float(ops.ReduceSum()(parameter).asnumpy()) for parameter in network.trainable_params())
print(f"accuracy {accuracy(network):.4f}, sum of the weights {total:.6f}", flush=True)
