"""Test make_train_step with MindNLP models and plain cells: N ranks match one process with the full batch."""

from __future__ import annotations

import warnings

import mindspore
import numpy as np
import pytest
from library import nn, optim
from mindspore import nn as cells

import mindnlp_dp as dp
from mindnlp_dp.communication.replicas import replicas_in_sync
from mindnlp_dp.data_parallel.buckets.host_bucket import HostBucket
from models import VOCAB_SIZE, Rows, alone, assert_same_sums, tiny_roberta, weights

NUM_STEPS, GLOBAL_BATCH = 4, 8


def token_batches(seed=0):
    """Return global batches of token ids and labels for a classifier."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(5, VOCAB_SIZE, (GLOBAL_BATCH, 8)), rng.integers(0, 3, GLOBAL_BATCH)) for _ in range(NUM_STEPS)
    ]


def dense_batches(num_rows=GLOBAL_BATCH):
    rng = np.random.default_rng(1)
    return [
        (rng.standard_normal((num_rows, 6)).astype(np.float32), rng.integers(0, 3, num_rows).astype(np.int32))
        for _ in range(NUM_STEPS)
    ]


def part(batch, group, as_tensor=mindspore.Tensor):
    """Return this rank's rows of a batch, or None if it has none."""
    rows = [as_tensor(x[group.rank :: group.world_size]) for x in batch]
    return tuple(rows) if rows[0].shape[0] else None


def train_roberta(group, micro_steps=1, **options):
    model = tiny_roberta(seed=3)
    dp.broadcast_parameters(model)
    model.set_train(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.SGD(parameters, lr=0.1)
    step = dp.make_train_step(
        lambda ids, labels: model(ids, labels=labels).loss,
        optimizer,
        parameters,
        accumulation_steps=micro_steps,
        **options,
    )
    losses = []
    for batch in token_batches():
        if micro_steps == 1:
            step(part(batch, group))
        else:
            pieces = [[x[number::micro_steps] for x in batch] for number in range(micro_steps)]
            step([part(piece, group) for piece in pieces])
        losses.append(step.mean_loss())
    return weights(model), losses, step


@pytest.mark.core
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}, {"overlap": True}], ids=["plain", "clip", "overlap"])
def test_train_step_of_a_mindnlp_model_on_n_ranks_equals_one_process(group, micro_steps, options):
    mine, losses, step = train_roberta(group, micro_steps, **options)
    with alone() as single:
        expected, expected_losses, _ = train_roberta(single, 1, **options)
    for name, weight in expected.items():
        np.testing.assert_allclose(mine[name], weight, rtol=1e-5, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert step.num_updates == NUM_STEPS
    assert (step.grad_norm is not None) == ("max_grad_norm" in options)


def test_averaged_gradients_reuse_their_memory_in_every_update(group):
    """New memory would cost a page fault per 4 KiB, which takes longer than the exchange itself."""
    model = tiny_roberta()
    dp.broadcast_parameters(model)
    parameters = list(model.parameters())
    optimizer, places = optim.SGD(parameters, lr=0.1), []
    update = optimizer.step
    optimizer.step = lambda: (places.append([p.grad.data_ptr() for p in parameters if p.grad is not None]), update())
    step = dp.make_train_step(
        lambda ids, labels: model(ids, labels=labels).loss, optimizer, parameters, overlap=False, max_grad_norm=1e-3
    )
    if not isinstance(step.synchronizer.buckets[0], HostBucket):
        pytest.skip("a device's memory is MindSpore's to manage")
    for batch in token_batches():
        step(part(batch, group))
    assert places[0]
    assert places[1:] == places[:-1]


def network():
    mindspore.set_seed(5)
    return cells.SequentialCell(cells.Dense(6, 16), cells.ReLU(), cells.Dense(16, 3))


OPTIMIZERS = {
    "momentum": lambda p: cells.Momentum(p, 0.1, 0.9),
    "adam": lambda p: cells.Adam(p, 1e-2),
    "schedule": lambda p: cells.SGD(p, cells.cosine_decay_lr(0.0, 0.1, NUM_STEPS, NUM_STEPS, 1)),
}


def train_cell(group, make_optimizer=OPTIMIZERS["momentum"], batches=None, reducer=False, net=None, **options):
    net = net or network()
    dp.broadcast_parameters(net)
    loss_fn = cells.CrossEntropyLoss()
    optimizer = make_optimizer(net.trainable_params())
    if reducer:
        options["reducer"] = cells.DistributedGradReducer(optimizer.parameters, mean=True)

    def forward(x, y):
        # The added term keeps NaN rows visible; ReLU would turn NaN into zero.
        return loss_fn(net(x), y) + 0.0 * x.sum()

    step = dp.make_train_step(forward, optimizer, optimizer.parameters, **options)
    for batch in batches or dense_batches():
        step(part(batch, group))
    return [p.asnumpy().copy() for p in net.trainable_params()]


def assert_close(mine, expected, tolerance=2e-6):
    for one, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=tolerance)


@pytest.mark.core
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.2])
def test_train_step_of_a_mindspore_cell_on_n_ranks_equals_one_process(group, optimizer, max_grad_norm):
    mine = train_cell(group, OPTIMIZERS[optimizer], max_grad_norm=max_grad_norm)
    with alone() as single:
        expected = train_cell(single, OPTIMIZERS[optimizer], max_grad_norm=max_grad_norm)
    assert_close(mine, expected, 2e-5 if optimizer == "adam" else 2e-6)


def test_order_of_parameters_does_not_change_the_update(group):
    """MindSpore's optimizers take gradients by position, in the order of their groups."""

    def trained(order):
        net = network()
        dp.broadcast_parameters(net)
        parameters = net.trainable_params()
        optimizer = cells.SGD([{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2], "lr": 0.01}])
        step = dp.make_train_step(lambda x, y: cells.CrossEntropyLoss()(net(x), y), optimizer, order(parameters))
        for batch in dense_batches():
            step(part(batch, group))
        return [p.asnumpy().copy() for p in parameters]

    mine, expected = trained(list), trained(lambda parameters: [*parameters[::2], *parameters[1::2]])
    assert_close(mine, expected)
    with pytest.raises(ValueError, match=r"parameters must be those of the optimizer: only the optimizer has \['"):
        trained(lambda parameters: parameters[1:])


def test_duplicate_parameters_count_once(group):
    """This happens when two models share a module and the parameter lists of both are concatenated."""

    def trained(times):
        weight = nn.Parameter(mindspore.Tensor(np.full(4, 3.0, np.float32)))
        step = dp.make_train_step(
            lambda x: (weight * weight * x).sum(), optim.SGD([weight], lr=0.1), [weight] * times, max_grad_norm=1.0
        )
        step(mindspore.Tensor(np.ones(4, np.float32)))
        return step.grad_norm, weight.asnumpy()

    (once, weight), (twice, same) = trained(1), trained(2)
    assert once == twice
    np.testing.assert_array_equal(weight, same)


def test_overlap_with_a_mindspore_cell_gives_the_same_sums(group):
    mine = train_cell(group, overlap=True, bucket_cap_mb=1e-4)
    assert_same_sums(mine, train_cell(group, overlap=False))


def test_ranks_with_fewer_or_no_rows_equal_one_process(group):
    batches = [*dense_batches(7), *dense_batches(1)]
    mine = train_cell(group, batches=batches)
    with alone() as single:
        expected = train_cell(single, batches=batches)
    assert_close(mine, expected)


def test_jit_gives_the_same_weights(group):
    assert_close(train_cell(group, jit=True), train_cell(group, jit=False))


@pytest.mark.core
def test_distributed_grad_reducer_gives_the_same_weights(group):
    """The weights also agree with uneven rows per rank, because gradients are weighted before the reducer."""
    if group.backend == "mpi":
        pytest.skip("DistributedGradReducer needs MindSpore's own communication")
    assert_close(train_cell(group, reducer=True), train_cell(group))
    batches = dense_batches(7)
    assert_close(train_cell(group, batches=batches, reducer=True), train_cell(group, batches=batches))


def test_distributed_grad_reducer_accepts_mindnlp_parameters(group):
    if group.backend == "mpi":
        pytest.skip("DistributedGradReducer needs MindSpore's own communication")
    rows = Rows(24)

    def trained(with_reducer):
        model = tiny_roberta()
        parameters = list(model.parameters())
        options = {"reducer": cells.DistributedGradReducer(parameters, mean=True)} if with_reducer else {}

        def forward(input_ids, labels):
            return model(input_ids=input_ids, labels=labels).loss

        step = dp.make_train_step(forward, optim.SGD(parameters, lr=0.1), parameters, **options)
        for (batch,) in dp.make_loader(rows, 4, columns=["input_ids", "label"]).updates():
            step(batch)
        return [p.asnumpy().copy() for p in parameters]

    assert_close(trained(True), trained(False))


def test_nan_loss_of_one_rank_gives_a_warning_or_raises_on_all_ranks(group):
    batches = dense_batches()
    poisoned = [x.copy() for x in batches[1]]
    poisoned[0][0] = np.nan  # rank 0's first row
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left_out = train_cell(group, batches=[batches[0], tuple(poisoned), *batches[2:]])
    (said,) = [str(w.message) for w in caught if "left out" in str(w.message)]
    assert said.startswith("the loss of a micro-batch is nan at step 1 on rank 0")
    is_of_rank_0 = np.arange(GLOBAL_BATCH) % group.world_size == 0
    others = [tuple(x[~is_of_rank_0] for x in batches[1])] if group.world_size > 1 else []
    net = network()
    with pytest.raises(FloatingPointError, match="nan at step 1 on rank 0"):
        train_cell(group, batches=[batches[0], tuple(poisoned)], leave_out_bad_losses=False, net=net)
    with alone() as single:
        # The rows of the other ranks count, and an update without any rows changes no weights.
        assert_close(left_out, train_cell(single, batches=[batches[0], *others, *batches[2:]]))
        before_the_error = train_cell(single, batches=batches[:1])
    assert_close([p.asnumpy() for p in net.trainable_params()], before_the_error)


@pytest.mark.parametrize(
    ("convert", "error"),
    [
        (lambda losses: float(losses.mean().asnumpy()), "must return its loss as a tensor, .* it returned float"),
        (lambda losses: losses, r"must return one loss, .* a tensor of shape \(4,\)"),
        (lambda losses: (losses.mean(), losses), "must return its loss as a tensor, .* it returned tuple"),
        (lambda losses: None, "must return its loss as a tensor, .* it returned NoneType"),
    ],
)
def test_forward_fn_without_a_scalar_loss_is_refused(group, convert, error):
    weight = mindspore.Parameter(mindspore.Tensor(np.ones(3, np.float32)), name="weight")
    optimizer = mindspore.nn.SGD([weight], 0.1)
    step = dp.make_train_step(lambda x: convert((x * weight).sum(-1)), optimizer, [weight], group=group)
    with pytest.raises((TypeError, ValueError), match=error):
        step(mindspore.Tensor(np.ones((4, 3), np.float32)))


def test_incompatible_train_step_options_are_refused(group):
    net = network()
    parameters = net.trainable_params()
    plain, mindnlp = cells.Momentum(parameters, 0.1, 0.9), optim.SGD(list(tiny_roberta().parameters()), lr=0.1)
    with pytest.raises(ValueError, match="jit=True is for plain cells"):
        dp.make_train_step(len, mindnlp, [], jit=True)
    with pytest.raises(ValueError, match="take a schedule as their learning_rate"):
        dp.make_train_step(len, plain, parameters, scheduler=object())
    with pytest.raises(ValueError, match="overlap: options of our own exchange"):
        dp.make_train_step(len, plain, parameters, reducer=len, overlap=True)
    with pytest.raises(ValueError, match="overlap needs the parameters' hooks, which mindspore.jit cannot compile"):
        dp.make_train_step(len, plain, parameters, jit=True, overlap="auto")
    with pytest.raises(ValueError, match="accumulation_steps must be at least 1, got 0"):
        dp.make_train_step(len, plain, parameters, accumulation_steps=0)
    step = dp.make_train_step(len, plain, parameters, accumulation_steps=2)
    with pytest.raises(ValueError, match="expected 1 to 2 micro-batches, got 3"):
        step([None] * 3)


def seeded_by_rank(group):
    """Return a network with a frozen first layer, and with different weights and statistics on every rank."""
    mindspore.set_seed(group.rank)
    np.random.seed(group.rank)
    net = cells.SequentialCell(cells.Dense(6, 6), cells.BatchNorm1d(6), cells.Dense(6, 3))
    for parameter in net[0].trainable_params():
        parameter.requires_grad = False
    net[1].moving_mean.set_data(mindspore.Tensor(np.full(6, float(group.rank), np.float32)))
    return net


@pytest.mark.core
def test_train_step_broadcasts_weights_frozen_weights_and_buffers_of_rank_0(group):
    net, loss_fn = seeded_by_rank(group), cells.CrossEntropyLoss()
    optimizer = cells.SGD(net.trainable_params(), 0.1)
    assert replicas_in_sync(net) == (group.world_size == 1)
    step = dp.make_train_step(lambda x, y: loss_fn(net(x), y), optimizer, net.trainable_params())
    dp.assert_replicas_in_sync(net)
    net.set_train()
    for batch in dense_batches():
        step(part(batch, group))
    dp.broadcast_buffers(net)
    dp.assert_replicas_in_sync(net)


def test_train_step_warns_on_rank_0_of_several_which_model_it_found_without_model(group):
    model = tiny_roberta(0)
    parameters = list(model.parameters())

    def warned(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dp.make_train_step(lambda ids: model(ids).loss, optim.SGD(parameters, lr=0.1), parameters, **options)
        return [each for each in caught if "model= is missing, and Roberta" in str(each.message)]

    found = warned()
    assert len(found) == (group.is_main and group.world_size > 1)
    assert all(each.filename == __file__ for each in found)
    assert warned(model=model) == []


def test_train_step_broadcasts_frozen_weights_of_a_mindnlp_model(group):
    model = tiny_roberta(seed=group.rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "embeddings" not in name
    parameters = [p for p in model.parameters() if p.requires_grad]
    dp.make_train_step(lambda ids: model(ids).loss, optim.SGD(parameters, lr=0.1), parameters)
    dp.assert_replicas_in_sync(model)
    np.testing.assert_array_equal(
        weights(model)["classifier.dense.weight"], weights(tiny_roberta(0))["classifier.dense.weight"]
    )


def test_adam_with_half_precision_parameters_gives_one_warning(group):
    model = tiny_roberta().half()
    parameters = list(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in (optim.AdamW, optim.SGD):
            dp.make_train_step(lambda ids: model(ids).loss, kind(parameters, lr=0.1), parameters)
    said = [str(warning.message) for warning in caught if "moments" in str(warning.message)]
    assert len(said) == group.is_main
    assert all(message.startswith("AdamW keeps its moments in the parameters' type, and float16") for message in said)


def test_reducer_is_not_called_on_one_rank():
    """The reducer is not called, because MindSpore's crashes such a process with a segmentation fault."""
    with alone():
        net, loss_fn = network(), cells.CrossEntropyLoss()
        parameters = net.trainable_params()
        before = [p.asnumpy().copy() for p in parameters]
        step = dp.make_train_step(
            lambda x, y: loss_fn(net(x), y), cells.SGD(parameters, 0.1), parameters,
            reducer=lambda gradients: pytest.fail("no rank to exchange with"),
        )  # fmt: skip
        step(tuple(map(mindspore.Tensor, dense_batches()[0])))
        assert all(not np.array_equal(p.asnumpy(), old) for p, old in zip(parameters, before))
