"""Compares Muon with its reference in NumPy, with PyTorch's and with SVD; tests its groups, refusals and owners."""

from __future__ import annotations

import math
from types import SimpleNamespace

import mindspore
import numpy as np
import pytest
from library import is_0_5, nn
from muon_reference import muon_reference

import mindnlp_dp as dp
from mindnlp_dp.optim import Muon, muon_groups
from mindnlp_dp.optim.flat_updater import FlatUpdater
from mindnlp_dp.optim.newton_schulz import multiplications, orthogonalize
from mindnlp_dp.optim.updater_factory import make_updater
from mindnlp_dp.optim.zero.parameterwise import assign_parameters, owners_of
from models import tiny_roberta

SHAPES = [(6, 4), (4, 6), (5, 5), (6, 9), (7,), (2, 3, 2, 2)]
PLAIN = {"num_packed": 1, "packed_axis": 0}


def optimizer_of(parameters, **options):
    return Muon(
        [
            {"params": parameters[:2]},
            {"params": parameters[2:3], "weight_decay": 0.0, "nesterov": False},
            {"params": parameters[3:4], "num_packed": 3, "packed_axis": 1, "lr": 0.01},
            {"params": parameters[4:], "use_muon": False},
        ],
        lr=0.02,
        **options,
    )


def start():
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def gradient(step, index):
    return np.random.default_rng([step, index]).standard_normal(SHAPES[index]).astype(np.float32)


def by_reference(optimizer, num_updates):
    """Return the matrices after these updates, in float64."""
    found = []
    groups = [optimizer.param_groups[number] for number in (0, 0, 1, 2)]
    for index, group in enumerate(groups):
        parts = np.split(start()[index].astype(np.float64), group["num_packed"], 1)
        moments = [np.zeros_like(part) for part in parts]
        for step in range(num_updates):
            gradients = np.split(gradient(step, index).astype(np.float64), len(parts), 1)
            both = [muon_reference(w, g, m, group) for w, g, m in zip(parts, gradients, moments)]
            parts, moments = [w for w, _ in both], [m for _, m in both]
        found.append(np.concatenate(parts, 1))
    return found


@pytest.mark.core
@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_fifty_updates_equal_the_reference_with_and_without_a_train_step(adjust_lr_fn):
    mine = [nn.Parameter(mindspore.Tensor(x)) for x in start()]
    ours = [nn.Parameter(mindspore.Tensor(x)) for x in start()]
    optimizer = optimizer_of(mine, adjust_lr_fn=adjust_lr_fn)
    synchronizer = dp.GradientSynchronizer(ours, dp.init_process_group(), overlap=False)
    updater = make_updater(optimizer_of(ours, adjust_lr_fn=adjust_lr_fn), synchronizer, 0)
    assert isinstance(updater, FlatUpdater)
    for step in range(50):
        for index, parameter in enumerate(mine):
            parameter.grad = mindspore.Tensor(gradient(step, index))
        optimizer.step()
        synchronizer.accumulate([mindspore.Tensor(gradient(step, index)) for index in range(len(SHAPES))])
        updater.step(updater.receive(synchronizer.reduce(in_place=updater.reads_buckets), synchronizer))
    for one, other in zip(mine, ours):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), atol=2e-6)
    for parameter, expected in zip(ours, by_reference(optimizer, 50)):
        np.testing.assert_allclose(parameter.asnumpy(), expected, atol=1e-5)
    names = [sorted(entry) for entry in updater.optimizer_state()["state"].values()]
    assert names == [["momentum_buffer", "step"]] * 4 + [["exp_avg", "exp_avg_sq", "step"]] * 2


# Made by torch.optim.Muon of PyTorch 2.14.1 with its defaults, lr=0.02 and float32 in place of bfloat16
# (torch.Tensor.bfloat16 = torch.Tensor.clone), on gradients of np.random.default_rng(0), which drew the weights before:
# the first six weights after 50 updates, and the sum of all.
BY_PYTORCH = [
    ("original", (6, 4), True, [-0.0272161, -0.3006299, 0.6410993, 0.3424992, -0.2652806, 0.5283754], -1.2754157),
    ("match_rms_adamw", (4, 6), True, [0.030135, -0.1529915, 0.6128983, 0.1673619, -0.3449357, 0.4756058], -2.0407320),
    ("match_rms_adamw", (5, 5), False, [0.0625589, -0.1209475, 0.6883622, 0.2707845, -0.6657629, 0.3405341], -1.218993),
]  # fmt: skip


@pytest.mark.parametrize(("adjust_lr_fn", "shape", "nesterov", "first", "total"), BY_PYTORCH)
def test_fifty_updates_equal_those_of_pytorchs_muon_in_float32(adjust_lr_fn, shape, nesterov, first, total):
    rng = np.random.default_rng(0)
    parameter = nn.Parameter(mindspore.Tensor(rng.standard_normal(shape).astype(np.float32)))
    optimizer = Muon([parameter], lr=0.02, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov)
    for _ in range(50):
        parameter.grad = mindspore.Tensor(rng.standard_normal(shape).astype(np.float32))
        optimizer.step()
    np.testing.assert_allclose(parameter.asnumpy().reshape(-1)[:6], first, atol=1e-5)
    assert parameter.asnumpy().astype(np.float64).sum() == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (1, 5), (5, 1)])
def test_orthogonalized_matrices_are_near_the_polar_factor(shape):
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    exact = {"ns_coefficients": (1.875, -1.25, 0.375), "ns_steps": 40, "eps": 1e-7}
    np.testing.assert_allclose(orthogonalize(matrix, exact, np.matmul), left @ right, atol=1e-5)
    usual = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
    # These coefficients converge to singular values from 0.7 to 1.2 only.
    values = np.linalg.svd(orthogonalize(matrix, usual, np.matmul), compute_uv=False)
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_a_zero_gradient_moves_no_weight_and_a_huge_one_moves_it_as_usual():
    start = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    moved = []
    for size in (0.0, 1.0, 1e25):
        parameter = nn.Parameter(mindspore.Tensor(start))
        parameter.grad = mindspore.Tensor(start * np.float32(size))
        Muon([parameter], weight_decay=0.0).step()
        moved.append(parameter.asnumpy())
    np.testing.assert_array_equal(moved[0], start)
    assert (moved[1] != start).all()
    np.testing.assert_allclose(moved[2], moved[1], rtol=1e-5)


def parameter(*shape):
    return nn.Parameter(mindspore.Tensor(np.ones(shape, np.float32)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Muon([parameter(3)]), r"has a parameter of shape \(3,\); put it into a group with use_muon=False"),
        (lambda: Muon([parameter(4, 3, 2, 2)]), r"has a parameter of shape \(4, 3, 2, 2\)"),
        (lambda: Muon([parameter(3, 4)], num_packed=3, packed_axis=1), "cannot be split into num_packed=3 equal"),
        (lambda: Muon([parameter(3, 4)], momentum=1.0), "momentum must be from 0 to below 1, got 1.0"),
        (lambda: Muon([parameter(3, 4)], ns_steps=0), "ns_steps must be from 1 to 99, got 0"),
        (lambda: Muon([parameter(3, 4)], ns_coefficients=(1, 2)), "ns_coefficients must be 3 numbers"),
        (lambda: Muon([parameter(3, 4)], num_packed=0), "num_packed must be at least 1, got 0"),
        (lambda: Muon([{"params": [parameter(3, 4)], "maximize": True}]), "maximize must be False, got True"),
        (lambda: Muon([parameter(3, 4)], packed_axis=2), "packed_axis must be 0 or 1, got 2"),
        (lambda: Muon([parameter(3, 4)], adjust_lr_fn="rms"), r"adjust_lr_fn must be one of \(None, 'original'"),
    ],
)
def test_wrong_groups_are_errors_that_say_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def names_of(model, groups):
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in groups]


def test_groups_of_a_model_are_linear_layers_and_the_rest():
    model = tiny_roberta()
    next(p for name, p in model.named_parameters() if "intermediate.dense.weight" in name).requires_grad = False
    groups = muon_groups(model, 0.1)
    assert [(group["use_muon"], group["weight_decay"]) for group in groups] == [(True, 0.1), (False, 0.1), (False, 0.0)]
    found = names_of(model, groups)
    assert {name.rsplit(".", 2)[1] for name in found[0]} <= {"query", "key", "value", "dense"}
    assert not any("intermediate" in name or "classifier" in name or "embedding" in name for name in found[0])
    assert {"classifier.dense.weight", "roberta.embeddings.word_embeddings.weight"} <= found[1]
    assert all(p.ndim == 1 for p in groups[2]["params"])
    Muon(groups)


def test_embeddings_among_matrices_are_refused_by_name():
    model = tiny_roberta()
    optimizer = Muon([p for p in model.parameters() if p.ndim == 2])

    def forward(input_ids, labels):
        return model(input_ids=input_ids, labels=labels, return_dict=True).loss

    with pytest.raises(ValueError, match=r"word_embeddings.weight' is an embedding, which Muon does not"):
        dp.make_train_step(forward, optimizer, list(model.parameters()), model=model)


def busiest(costs, owners):
    """Return the largest load of an owner, divided by the mean of all owners."""
    loads = np.bincount(owners, weights=costs)
    return loads.max() / loads.mean()


def llama(hidden, layers, inner, heads, kv_heads):
    kv = hidden // heads * kv_heads
    return [
        (hidden, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, hidden),
        *[(inner, hidden)] * 2,
        (hidden, inner),
    ] * layers


@pytest.mark.core
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "shapes",
    [llama(896, 24, 4864, 14, 2), llama(2048, 16, 8192, 32, 8)],
    ids=["qwen2-0.5b", "llama-3.2-1b"],
)
def test_the_busiest_owner_has_at_most_a_tenth_more_than_the_mean(shapes, num_ranks):
    costs = [multiplications(shape, {**PLAIN, "ns_steps": 5}) for shape in shapes]
    assert busiest(costs, assign_parameters(costs, num_ranks)) <= 1.1
    # Where full parameters are assigned, among them an embedding and the norms, matrices have the same owners.
    parameters = [SimpleNamespace(shape=shape) for shape in (*shapes, (150_000, shapes[0][0]), *[(shapes[0][0],)] * 49)]
    groups = [{"use_muon": True, "params": parameters[: len(shapes)], **PLAIN, "ns_steps": 5}]
    groups.append({"use_muon": False, "params": parameters[len(shapes) :]})
    owners = [owners_of(parameters, groups, num_ranks)[id(p)] for p in parameters]
    assert busiest(costs, owners[: len(shapes)]) <= 1.1
    state = [math.prod(p.shape) * (1 if number < len(shapes) else 2) for number, p in enumerate(parameters)]
    assert busiest(state, owners) * sum(state) / num_ranks <= sum(state) / num_ranks + 2 * 150_000 * shapes[0][0]


def test_owners_by_size_would_have_other_loads():
    shapes = llama(896, 24, 4864, 14, 2)
    costs = [multiplications(shape, {**PLAIN, "ns_steps": 5}) for shape in shapes]
    owners = assign_parameters([math.prod(shape) for shape in (*shapes, (151_936, 896))], 4)
    assert busiest(costs, owners[: len(shapes)]) > 1.3


@pytest.mark.skipif(is_0_5, reason="MindNLP 0.4.1's own model")
def test_gpt2s_packed_projections_are_three_matrices_each():
    from mindnlp.transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=12, n_layer=2, n_head=2))
    groups = muon_groups(model)
    packed = [group for group in groups if group["use_muon"] and group["num_packed"] == 3]
    assert [(group["packed_axis"], len(group["params"])) for group in packed] == [(1, 2)]
    found = names_of(model, groups)
    # The head shares the embedding's weight.
    assert [number for number, names in enumerate(found) if "transformer.wte.weight" in names] == [2]
    assert not groups[2]["use_muon"]
    assert sum(map(len, found)) == len(list(model.parameters()))


def test_tensor_parallelism_is_refused_in_a_sentence():
    matrix = parameter(3, 4)
    synchronizer = dp.GradientSynchronizer([matrix], dp.init_process_group(), overlap=False)
    scope = SimpleNamespace(is_full=False, has_sharded_parameters=True)
    with pytest.raises(ValueError, match=r"Muon needs full matrices, and each rank has a part of them \(tp > 1\)"):
        make_updater(Muon([matrix]), synchronizer, 0, scope=scope)
