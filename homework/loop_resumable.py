r"""Train loop_mindnlp_dp.py with the loader, checkpoints and evaluation of mindnlp_dp; kill it and start it again.

    mindnlp-dp run --nproc 2 homework/loop_resumable.py
    msrun --worker_num=2 --local_worker_num=2 --master_port=8118 --log_dir=logs/loop --join=True \
        homework/loop_resumable.py

It resumes from the newest complete checkpoint in outputs/loop (or the given folder) and ends with the same weights as a
run that was not interrupted.
"""

import sys

import mindspore
from mindspore import nn
from phrases import NUM_FEATURES, NUM_LABELS, Phrases

import mindnlp_dp as dp
from mindnlp_dp.training.evaluate import accuracy

EPOCHS, BATCH_SIZE, SAVE_EVERY = 4, 128, 25
folder = sys.argv[1] if len(sys.argv) > 1 else "outputs/loop"

group = dp.init_process_group()
mindspore.set_seed(1)

network = nn.SequentialCell(nn.Dense(NUM_FEATURES, 128), nn.ReLU(), nn.Dense(128, NUM_LABELS))
optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.5, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()


def forward_fn(features, labels):
    return loss_fn(network(features), labels)


def predict_fn(features, labels):
    logits = network(features)
    return loss_fn(logits, labels), (logits, labels)


dp.broadcast_parameters(network)
step = dp.make_train_step(forward_fn, optimizer, optimizer.parameters)
train = dp.make_loader(Phrases(), BATCH_SIZE // group.world_size, shuffle=True, seed=1)
run = dp.FunctionalRun(folder, network, step, train)
if run.resume() and group.is_main:
    print(f"continuing after update {step.num_updates}", flush=True)

for batch in run.updates(EPOCHS):
    step(batch)
    if step.num_updates % SAVE_EVERY == 0:
        mean_loss = step.mean_loss()
        run.save()
        if group.is_main:
            print(f"epoch {run.epoch}, update {step.num_updates}: loss {mean_loss:.4f}", flush=True)

test = dp.make_loader(Phrases(held_out=True), 256)
evaluation = dp.evaluate(predict_fn, test, has_loss=True)
digest = dp.assert_replicas_in_sync(network)
if group.is_main:
    share = accuracy(*evaluation.outputs)
    print(f"accuracy {share:.4f}, loss {evaluation.loss:.4f}, digest {digest}", flush=True)
