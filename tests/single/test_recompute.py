"""Test recomputation of activations in one process: the same gradients, fewer activations, and which layers."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import mindspore
import numpy as np
import pytest
from library import autograd, is_0_5, nn, optim, set_seed

import mindnlp_dp as dp
from mindnlp_dp.kernels import dispatch, functions
from mindnlp_dp.runtime.arrays import set_weight
from mindnlp_dp.runtime.random_state import RandomState, seeded
from models import Rows, tiny_roberta, train, weights

needs_0_4 = pytest.mark.skipif(is_0_5, reason="its models are built with MindNLP 0.4's names")
KINDS = ("bert", "roberta", "gpt2", "t5", "llama", "mixtral")


@pytest.fixture(autouse=True)
def one_process():
    dp.init_process_group()
    before = dispatch._are_on
    yield
    dispatch.choose("auto" if before else "mindspore", 1)


def inputs():
    rows = Rows(4)
    return {"input_ids": rows.input_ids, "labels": rows.labels}


def gradients(model, columns=None):
    """Return the loss and the gradients of the trainable parameters, with the same dropout at every call."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    function = autograd.value_and_grad(lambda **batch: model(**batch)[0], tuple(parameters), attach_grads=False)
    with seeded(7):
        loss, found = function(**{name: mindspore.Tensor(array) for name, array in (columns or inputs()).items()})
    return [np.array(float(loss.asnumpy())), *(x.asnumpy() for x in found)]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


def count_forwards(layer):
    """Return a list that grows with every forward pass of a module within ``layer``."""
    calls, inner = [], layer.attention
    stock = inner.forward
    inner.forward = lambda *args, **kwargs: calls.append(1) or stock(*args, **kwargs)
    return calls


@pytest.mark.core
@needs_0_4
@pytest.mark.parametrize("kernels", ["auto", "mindspore"])
@pytest.mark.parametrize("kind", KINDS)
def test_recompute_with_dropout_gives_bitwise_equal_gradients(kind, kernels):
    from tiny_transformers import batch, build

    dispatch.choose(kernels, 1)
    model = build(kind, dropout=0.1)
    expected = gradients(model, batch(kind, 4))
    names = dp.enable_recompute(model)
    # T5 has two layers in its encoder, and two in its decoder.
    assert len(names) == (2 if kind == "mixtral" else 4)
    assert_equal(gradients(model, batch(kind, 4)), expected)
    assert all(np.any(gradient) for gradient in expected[1:])


@pytest.mark.parametrize("kernels", ["auto", "mindspore"])
def test_the_random_state_is_replayed_in_a_block_with_another_seed(kernels):
    dispatch.choose(kernels, 1)

    def draws():
        ones = mindspore.Tensor(np.ones((4, 50), np.float32))
        return [nn.functional.dropout(ones, 0.5).asnumpy(), np.random.random(3), np.array([random.random()])]

    with seeded(1):
        draws()
        state = RandomState.current()
        expected = draws()
    with seeded(2):
        first, second = draws(), draws()
    with seeded(2):
        np.random.seed(5)
        assert_equal(draws()[:1], first[:1])
        with state.replayed():
            assert_equal(draws(), expected)
        assert_equal(draws()[:1], second[:1])


def test_recomputed_layers_run_twice_in_training_and_once_otherwise():
    model = tiny_roberta(num_layers=2, dropout=0.1)
    expected = gradients(model)
    calls = count_forwards(model.roberta.encoder.layer[0])
    for number, (switch, layers) in enumerate([(True, 2), (False, 1), (True, 2)]):
        model.gradient_checkpointing_enable() if switch else model.gradient_checkpointing_disable()
        calls.clear()
        assert_equal(gradients(model), expected)
        assert (number, len(calls), model.is_gradient_checkpointing) == (number, layers, switch)
    model.eval()
    calls.clear()
    model(mindspore.Tensor(inputs()["input_ids"]))
    assert len(calls) == 1


@pytest.mark.skipif(is_0_5, reason="MindNLP 0.5 draws masks in MindSpore's kernel")
def test_recompute_frees_dropout_masks_before_the_backward_pass(monkeypatch):
    masks = []
    stock = functions.dropout_mask

    def dropout_mask(*args):
        mask = stock(*args)
        masks.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(functions, "dropout_mask", dropout_mask)
    for recompute, num_kept in ((False, 9), (True, 3)):
        model = tiny_roberta(num_layers=2, dropout=0.1)
        dp.enable_recompute(model, recompute)
        left = []

        def forward(model=model, left=left, **columns):
            masks.clear()
            loss = model(**columns)[0]
            gc.collect()
            left.append(sum(mask() is not None for mask in masks))
            return loss

        model.train()
        parameters = tuple(model.parameters())
        columns = {name: mindspore.Tensor(array) for name, array in inputs().items()}
        autograd.value_and_grad(forward, parameters, attach_grads=False)(**columns)
        # The embedding's and the head's two are kept, and the three of each layer only without recomputation.
        assert left == [num_kept]


def test_recompute_layers_are_chosen_by_interval_or_pattern():
    model = tiny_roberta(num_layers=4)
    layers = [f"roberta.encoder.layer.{number}" for number in range(4)]
    assert dp.enable_recompute(model) == layers
    assert dp.enable_recompute(model, 2) == layers[::2]
    assert dp.enable_recompute(model, 9) == layers[:1]
    assert dp.enable_recompute(model, "encoder.layer.[1-2]") == layers[1:3]
    assert dp.enable_recompute(model, ["layer.0", "roberta.encoder.layer.3"]) == [layers[0], layers[3]]
    # A layer that contains another chosen one counts once.
    assert dp.enable_recompute(model, ["layer.0", "attention"]) == [
        layers[0], *(f"{layer}.attention" for layer in layers[1:])
    ]  # fmt: skip
    calls = count_forwards(model.roberta.encoder.layer[0])
    expected = gradients(model)
    assert len(calls) == 2
    # A module that was chosen earlier now only contains the layers.
    assert dp.enable_recompute(model, "encoder") == ["roberta.encoder"]
    assert dp.enable_recompute(model) == layers
    calls.clear()
    assert_equal(gradients(model), expected)
    assert len(calls) == 2
    assert dp.enable_recompute(model, False) == []
    calls.clear()
    assert_equal(gradients(model), expected)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "layers", [0, -1, "0", "dropout", 1.5, "", [], None, ["layer.0", ""], "encoder.layers", ["layer.0", "nothing"]]
)
def test_unknown_recompute_layers_are_refused(layers):
    model = tiny_roberta(num_layers=2)
    dp.enable_recompute(model, "layer.1")
    with pytest.raises(ValueError, match=r"(layers to recompute are True|no layer with weights of Roberta.*is named)"):
        dp.enable_recompute(model, layers)
    calls = count_forwards(model.roberta.encoder.layer[1])
    gradients(model)
    assert len(calls) == 2  # as before


class Block(nn.Module):
    """A layer of eight features that takes a tensor, or a list or dictionary of several."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(8, width), nn.Dropout(0.2), nn.Linear(width, 8)

    def forward(self, x):
        x = x["x"] if isinstance(x, dict) else x[-1] if isinstance(x, list) else x
        return x + self.down(self.dropout(self.up(x)))


class OtherBlock(Block):
    pass


class Stack(nn.Module):
    """Runs layers one after another, by a function of the layers and the input."""

    def __init__(self, layers, run):
        super().__init__()
        self.layers, self.run = nn.ModuleList(layers), run

    def forward(self, x):
        return ((self.run(self.layers, x) ** 2).mean(),)


def in_turn(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def growing_list(layers, x):
    found = [x]
    for layer in layers:
        found.append(layer(found))
    return sum(found)


def changing_dictionary(layers, x):
    found = {"x": x}
    for layer in layers:
        found["x"] = layer(found)
    return found["x"]


def sequence():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2))


STACKS = {
    "layers of two classes": (lambda: [Block(), OtherBlock(), Block()], in_turn, 3),
    "a list that grows": (lambda: [Block(), Block(), Block()], growing_list, 3),
    "a dictionary that changes": (lambda: [Block(), Block()], changing_dictionary, 2),
    "sequences of operators": (lambda: [sequence(), sequence()], in_turn, 2),
    "single modules": (lambda: [nn.Linear(8, 8), nn.Linear(8, 8)], in_turn, 2),
    "single modules beside layers": (lambda: [Block(), nn.Linear(8, 8), Block()], in_turn, 2),
    "sequences of layers": (lambda: [nn.Sequential(Block(), Block()), nn.Sequential(Block())], in_turn, 3),
}


@pytest.mark.parametrize("name", STACKS)
def test_recompute_works_for_layer_lists_of_every_form(name):
    build, run, num_layers = STACKS[name]
    set_seed(4)
    model = Stack(build(), run)
    values = {"x": np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)}
    expected = gradients(model, values)
    assert len(dp.enable_recompute(model)) == num_layers
    assert_equal(gradients(model, values), expected)


@needs_0_4
def test_recompute_does_not_count_experts_as_layers():
    from tiny_transformers import build

    assert dp.enable_recompute(build("mixtral"), 2) == ["model.layers.0"]


@needs_0_4
def test_recompute_with_a_key_value_cache_keeps_the_gradients():
    from mindnlp.transformers import DynamicCache
    from tiny_transformers import batch, build

    model = build("llama", dropout=0.1)
    columns = batch("llama", 2)

    def with_cache():
        stock, forward = model.forward, type(model).forward
        model.forward = lambda **inputs: forward(model, past_key_values=DynamicCache(), use_cache=True, **inputs)
        try:
            return gradients(model, columns)
        finally:
            model.forward = stock

    expected = with_cache()
    dp.enable_recompute(model)
    assert_equal(with_cache(), expected)


@needs_0_4
def test_recompute_applies_to_every_model_of_a_loss():
    one, other = tiny_roberta(num_layers=1, dropout=0.1), tiny_roberta(seed=1, num_layers=1, dropout=0.1)
    parameters = [*one.parameters(), *other.parameters()]
    calls = [count_forwards(model.roberta.encoder.layer[0]) for model in (one, other)]
    for model in (one, other):
        dp.enable_recompute(model)
    step = dp.make_train_step(lambda **x: one(**x)[0] + other(**x)[0], optim.SGD(parameters, lr=0.1), parameters)
    step(inputs())
    assert list(map(len, calls)) == [2, 2]


def test_recompute_works_after_sync_batch_norm_replaces_a_layer():
    model = Stack([nn.BatchNorm1d(8), Block()], in_turn)
    dp.enable_recompute(model, "layers.0")
    dp.convert_sync_batchnorm(model)
    model.train()
    calls, kind = [], type(model.layers[0])
    stock = kind.forward
    try:
        kind.forward = lambda self, x: calls.append(1) or stock(self, x)
        gradients(model, {"x": np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)})
    finally:
        kind.forward = stock
    assert len(calls) == 2


def test_a_deep_copy_recomputes_its_own_layers():
    model = tiny_roberta(num_layers=1, dropout=0.1)
    expected = gradients(model)
    dp.enable_recompute(model)
    copied = copy.deepcopy(model)
    dp.enable_recompute(model, False)
    for parameter in model.parameters():
        set_weight(parameter, mindspore.Tensor(np.zeros(parameter.shape, np.float32)))
    calls = count_forwards(copied.roberta.encoder.layer[0])
    assert_equal(gradients(copied), expected)
    assert len(calls) == 2


def test_gradients_are_right_after_a_failed_recomputation():
    model = tiny_roberta(num_layers=2, dropout=0.1)
    expected = gradients(model)
    dp.enable_recompute(model)
    intermediate = model.roberta.encoder.layer[0].intermediate
    stock, calls = intermediate.forward, []

    def fails_when_recomputed(*args):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("in the second pass")
        return stock(*args)

    intermediate.forward = fails_when_recomputed
    with pytest.raises(Exception, match="in the second pass"):
        gradients(model)
    assert_equal(gradients(model), expected)


@pytest.mark.core
@needs_0_4
@pytest.mark.parametrize("before", [True, False])
def test_lora_adapters_in_recomputed_frozen_layers_get_all_gradients(before):
    from mindnlp.peft import LoraConfig, get_peft_model
    from tiny_transformers import batch, build

    def adapted():
        model = build("llama", dropout=0.1)
        if before:
            model.gradient_checkpointing_enable()
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # zeros at first, so that nothing else has a gradient
                weight.assign_value(mindspore.ops.ones_like(weight) * 0.1)
        return model

    columns = batch("llama", 4)
    model = adapted()
    dp.enable_recompute(model, False)
    expected = gradients(model, columns)
    model = adapted()
    model.gradient_checkpointing_enable()
    found = gradients(model, columns)
    assert_equal(found, expected)
    num_trainable = sum(p.requires_grad for p in model.parameters())
    assert sum(bool(np.any(gradient)) for gradient in found[1:]) == num_trainable == 16


def test_recompute_updates_batch_norm_statistics_once():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.2)
            self.norm = nn.BatchNorm1d(6, momentum=None)

        def forward(self, x):
            return x + self.dropout(self.norm(self.linear(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return ((x**2).mean(),)

    found = []
    for recompute in (False, True):
        set_seed(2)
        model = Model()
        dp.enable_recompute(model, recompute)
        values = np.random.default_rng(0).standard_normal((9, 6)).astype(np.float32)
        found.append(gradients(model, {"x": values}))
        gradients(model, {"x": values + 1})
        names = ("num_batches_tracked", "running_var", "running_mean")
        found[-1] += [getattr(layer.norm, name).asnumpy() for layer in model.layers for name in names]
    assert np.any(found[0][-1])
    assert_equal(found[1], found[0])


@pytest.mark.skipif(is_0_5, reason="cells of MindSpore, which need no MindNLP")
@pytest.mark.parametrize("kernels", ["auto", "mindspore"])
def test_recompute_of_cells_replays_batch_norm_and_numpy_random_numbers(kernels):
    cells = mindspore.nn
    dispatch.choose(kernels, 1)

    class Block(cells.Cell):
        def __init__(self):
            super().__init__()
            self.dense, self.norm, self.dropout = cells.Dense(16, 16), cells.BatchNorm1d(16), cells.Dropout(p=0.3)

        def construct(self, x):
            return x + self.dropout(mindspore.ops.relu(self.norm(self.dense(x)))) * float(np.random.random())

    class Net(cells.Cell):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = cells.CellList([Block(), Block()]), cells.Dense(16, 1)

        def construct(self, x):
            for block in self.blocks:
                x = block(x)
            return (self.head(x) ** 2).mean()

    def trained(recompute):
        mindspore.set_seed(3)
        net = Net().set_train()
        dp.enable_recompute(net, recompute)
        parameters = net.trainable_params()
        step = dp.make_train_step(net, cells.SGD(parameters, 0.1), parameters)
        for number in range(3):
            step((mindspore.Tensor(np.random.default_rng(number).standard_normal((8, 16)).astype(np.float32)),))
        return [p.asnumpy() for p in net.get_parameters()]

    expected = trained(False)
    assert_equal(trained(True), expected)
    net = Net()
    dp.enable_recompute(net)
    for forward_fn in (net, lambda x: 2 * net(x)):
        with pytest.raises(ValueError, match="enable_recompute is for PyNative mode"):
            dp.make_train_step(forward_fn, cells.SGD(net.trainable_params(), 0.1), net.trainable_params(), jit=True)


def test_gradient_checkpointing_of_the_trainer_keeps_the_weights(tmp_path):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 5}
    expected = weights(train(tiny_roberta(num_layers=2, dropout=0.1), Rows(19), tmp_path, **settings).model)
    names = {"gradient_checkpointing": True}
    for more in (
        names,
        {**names, "recompute_layers": 2},
        {**names, "gradient_checkpointing_kwargs": {"use_reentrant": 1}},
    ):
        model = tiny_roberta(num_layers=2, dropout=0.1)
        calls = count_forwards(model.roberta.encoder.layer[0])
        trainer = train(model, Rows(19), tmp_path, **settings, **more)
        assert len(calls) == 2 * 5
        for name, weight in weights(trainer.model).items():
            np.testing.assert_array_equal(weight, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recompute_layers": 0}, "the layers to recompute are True"),
        ({"gradient_checkpointing_kwargs": {"context_fn": None}}, "takes use_reentrant only, got context_fn"),
    ],
)
def test_invalid_gradient_checkpointing_arguments_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        dp.DataParallelArguments(str(tmp_path), gradient_checkpointing=True, **settings)
    with pytest.raises(ValueError, match="recompute_layers is given, and gradient_checkpointing is not"):
        dp.DataParallelArguments(str(tmp_path), recompute_layers="anything")


@needs_0_4
def test_the_recompute_argument_of_mindnlp_enables_gradient_checkpointing(tmp_path):
    args = dp.DataParallelArguments(str(tmp_path), recompute=True, recompute_kwargs={"use_reentrant": False})
    assert args.gradient_checkpointing
    assert not args.recompute


def test_recompute_refuses_a_model_without_a_list_of_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with pytest.raises(ValueError, match="Sequential has no list of layers to recompute; name them by a pattern"):
        dp.enable_recompute(model)
