"""Tests that weights have initial values: those of MindNLP's models, and the error for a weight without a value."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindnlp.core import nn, optim
from mindnlp.core.nn import functional
from mindspore.common.initializer import Normal, initializer
from small_models import build, find

import mindnlp_dp as dp
from mindnlp_dp.runtime.arrays import is_uninitialized
from mindnlp_dp.training.uninitialized_weights import check_values, is_zero_by_mistake
from models import Rows, tiny_roberta, train

SHAPE = (3, 4)


@pytest.fixture(autouse=True)
def group():
    return dp.init_process_group()


def made_later():
    """Return what MindSpore's initializer returns: a tensor without memory."""
    value = initializer(Normal(1.0), SHAPE, mindspore.float32)
    assert is_uninitialized(value)
    return value


def without_memory():
    """Return a parameter without memory, as the original assign_value leaves it."""
    parameter = nn.Parameter(mindspore.ops.zeros(SHAPE))
    mindspore.Tensor.assign_value.__wrapped__(parameter, made_later())
    assert is_uninitialized(parameter)
    return parameter


def new():
    return nn.Parameter(mindspore.ops.zeros(SHAPE))


WAYS = {
    "Parameter": lambda: nn.Parameter(made_later()),
    "by name": lambda: nn.Parameter(input_data=made_later()),
    "assign_value": lambda: assigned("assign_value", made_later()),
    "set_data": lambda: assigned("set_data", made_later()),
    "initialize": lambda: assigned("initialize", Normal(1.0)),
    "copy_": lambda: assigned("copy_", made_later()),
    "setitem": lambda: with_row(made_later()),
    "a name": lambda: nn.Parameter(made_later(), "weight"),
}


def assigned(method, value):
    parameter = new()
    getattr(parameter, method)(value)
    return parameter


def with_row(value):
    parameter = nn.Parameter(mindspore.ops.zeros((2, *SHAPE)))
    parameter[1] = value
    return parameter


@pytest.mark.parametrize("way", WAYS)
def test_initializer_values_reach_the_parameter(way):
    if way == "copy_" and not hasattr(mindspore.Tensor, "copy_"):
        pytest.skip("this MindSpore has no Tensor.copy_")
    parameter = WAYS[way]()
    assert not is_uninitialized(parameter)
    assert parameter.asnumpy().std() > 0.1
    assert parameter.requires_grad


@pytest.mark.parametrize(
    "name",
    ["XLMRobertaForSequenceClassification", "XLMRobertaForMaskedLM", "DistilBertForSequenceClassification",
     "AlbertForMaskedLM", "ErnieForSequenceClassification", "ErnieMForSequenceClassification", "OPTForCausalLM",
     "FalconForCausalLM", "MBartForConditionalGeneration", "LongformerForMaskedLM", "RemBertForMaskedLM",
     "PLBartForConditionalGeneration", "ConvBertForMaskedLM", "MiniCPM3ForCausalLM"],
)  # fmt: skip
def test_models_built_from_a_config_have_initial_values(name):
    for each, parameter in build(find(name)).named_parameters():
        assert not is_uninitialized(parameter), each
        if parameter.ndim > 1 or each.endswith("weight"):
            assert not is_zero_by_mistake(each, parameter), each


def test_a_new_head_on_a_pretrained_model_has_initial_values(tmp_path):
    from mindnlp.transformers import XLMRobertaForSequenceClassification, XLMRobertaModel

    base = build(find("XLMRobertaForSequenceClassification")).roberta
    assert isinstance(base, XLMRobertaModel)
    base.save_pretrained(str(tmp_path))
    model = XLMRobertaForSequenceClassification.from_pretrained(str(tmp_path), num_labels=3)
    for layer in (model.classifier.dense, model.classifier.out_proj):
        assert 0.01 < layer.weight.asnumpy().std() < 0.03
    np.testing.assert_array_equal(
        model.roberta.encoder.layer[0].attention.self.query.weight.asnumpy(),
        base.encoder.layer[0].attention.self.query.weight.asnumpy(),
    )


def test_chatglm_does_not_change_the_initialization_of_other_layers():
    build(find("ChatGLM2ForConditionalGeneration"))
    from mindnlp.transformers import ChatGLM2ForConditionalGeneration
    from small_models import small_config

    ChatGLM2ForConditionalGeneration(small_config(ChatGLM2ForConditionalGeneration.config_class, original_rope=True))
    assert nn.Linear(8, 8).weight.asnumpy().std() > 0.1


def test_kernels_refuse_an_uninitialized_tensor():
    x = mindspore.Tensor(np.ones((2, 4), np.float32))
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(3, 4\) is uninitialized"):
        functional.linear(x, without_memory())


def broken(model, value):
    model.classifier.dense.weight = value
    return model


@pytest.mark.core
def test_the_trainer_refuses_an_uninitialized_weight(tmp_path):
    model = broken(tiny_roberta(), nn.Parameter(mindspore.ops.zeros((16, 16))))
    mindspore.Tensor.assign_value.__wrapped__(
        model.classifier.dense.weight, initializer(Normal(1.0), (16, 16), mindspore.float32)
    )
    with pytest.raises(ValueError, match=r"'classifier.dense.weight' of shape \(16, 16\) was never initialized"):
        train(model, Rows(8), tmp_path)


def test_the_trainer_warns_of_a_trainable_weight_of_zeros(tmp_path):
    model = broken(tiny_roberta(), nn.Parameter(mindspore.ops.zeros((16, 16))))
    with pytest.warns(RuntimeWarning, match="trainable weights are all zero: 'classifier.dense.weight'"):
        train(model, Rows(8), tmp_path)


def test_make_train_step_refuses_uninitialized_weights_and_warns_of_zeros():
    model = tiny_roberta()
    model.classifier.out_proj.weight = nn.Parameter(mindspore.ops.zeros((3, 16)))
    parameters = list(model.trainable_params())

    def forward(**inputs):
        return model(**inputs)[0]

    with pytest.warns(RuntimeWarning, match="'classifier.out_proj.weight'"):
        dp.make_train_step(forward, optim.SGD(parameters, lr=0.1), parameters)
    mindspore.Tensor.assign_value.__wrapped__(
        model.classifier.out_proj.weight, initializer(Normal(1.0), (3, 16), mindspore.float32)
    )
    with pytest.raises(ValueError, match="'classifier.out_proj.weight' of shape"):
        dp.make_train_step(forward, optim.SGD(parameters, lr=0.1), parameters)


def test_weights_that_are_zero_by_design_give_no_warning(group):
    from mindnlp.peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_roberta(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    zero, frozen = nn.Parameter(mindspore.ops.zeros(SHAPE)), nn.Parameter(mindspore.ops.zeros(SHAPE), False)
    by_design = [
        *model.named_parameters(), ("vit.embeddings.cls_token", zero), ("attention.q_bias", zero),
        # A frozen parameter and a parameter that is not a matrix are not checked.
        ("weight", frozen), ("vector.weight", nn.Parameter(mindspore.ops.zeros(3))),
    ]  # fmt: skip
    assert any("lora_B" in name and not weight.asnumpy().any() for name, weight in by_design)
    # Of all these only the last one is named.
    with pytest.warns(RuntimeWarning) as warned:
        check_values([*by_design, ("by.mistake.weight", zero)], group)
    (message,) = [str(each.message) for each in warned]
    assert message.startswith("trainable weights are all zero: 'by.mistake.weight'. If this is not intended")
