"""Test our CPU kernels on every rank: replicas agree, dropout differs by rank, cores do not change results."""

from __future__ import annotations

import numpy as np
import pytest
from library import TrainerCallback
from mindnlp.core import nn, ops
from mindnlp.transformers import BertConfig, BertForSequenceClassification
from mindspore import Tensor

import mindnlp_dp as dp
from mindnlp_dp.kernels import dispatch, matmul, onednn, workers
from models import Rows, alone, train

# The model is wide enough for its matrix products to be split among cores.
CONFIG = {"vocab_size": 50, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}


@pytest.fixture(autouse=True)
def as_before():
    num_cores, are_on = workers._num_cores, dispatch._are_on
    yield
    dispatch.choose("auto" if are_on else "mindspore", num_cores)


def trained(tmp_path, kernels, num_cores, **settings):
    from mindnlp.engine.utils import set_seed

    dispatch.choose(kernels, num_cores)
    set_seed(5)
    model = BertForSequenceClassification(BertConfig(intermediate_size=512, max_position_embeddings=16, **CONFIG))
    settings = {"per_device_train_batch_size": 64, "max_steps": 3, "learning_rate": 1e-3, **settings}
    trainer = train(model, Rows(640), tmp_path, **settings)
    dp.assert_replicas_in_sync(model)
    return dp.replica_digest(model), trainer.state.log_history[-1]["train_loss"]


@pytest.mark.core
def test_kernel_core_count_does_not_change_the_weights(group, shared_tmp_path):
    digests = {trained(shared_tmp_path, "auto", num_cores)[0] for num_cores in (1, 2, 3)}
    assert len(digests) == 1


def test_core_counts_may_differ_by_rank(group, shared_tmp_path):
    alike, _ = trained(shared_tmp_path, "auto", 1)
    assert trained(shared_tmp_path, "auto", 1 + group.rank % 2)[0] == alike


@pytest.fixture
def without_dropout(monkeypatch):
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        monkeypatch.setitem(CONFIG, name, 0.0)


def test_mindspore_kernels_give_the_same_loss(group, shared_tmp_path, without_dropout):
    """Dropout is off, because our kernels and MindSpore's draw different masks."""
    ours, theirs = (trained(shared_tmp_path, kernels, 1)[1] for kernels in ("auto", "mindspore"))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_bf16_training_is_the_same_with_any_zero_stage_and_in_one_process(
    group, shared_tmp_path, without_dropout, monkeypatch
):
    """Cores without bfloat16 take the same way, and compute in float32."""
    can = onednn.has_bfloat16()
    monkeypatch.setattr(onednn, "has_bfloat16", onednn.has_primitives)
    precisions = set()

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            precisions.add(dispatch.current_precision())

    several = [
        trained(shared_tmp_path, "auto", 1, bf16=True, zero_stage=stage, callbacks=[Look()]) for stage in (0, 1, 2)
    ]
    assert precisions == {"medium"}
    assert dispatch.current_precision() == "highest"
    assert len(set(several)) == 1
    with alone():
        _, loss = trained(
            shared_tmp_path / "alone", "auto", 1, bf16=True, per_device_train_batch_size=64 * group.world_size
        )
    # Products differ in their last bit, and so the rounding of some factors does.
    assert several[0][1] == pytest.approx(loss, rel=1e-3 if can else 1e-5)


def test_bf16_is_off_after_a_failed_training(group, shared_tmp_path, monkeypatch):
    monkeypatch.setattr(onednn, "has_bfloat16", onednn.has_primitives)

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert matmul.uses_bfloat16()
            raise KeyError("the user's callback")

    with pytest.raises(KeyError, match="the user's callback"):
        trained(shared_tmp_path, "auto", 1, bf16=True, callbacks=[Fail()])
    assert not matmul.uses_bfloat16()


@pytest.mark.core
def test_dropout_masks_differ_by_call_micro_step_and_rank(group):
    if not dispatch._are_on:
        pytest.skip("masks are MindSpore's")
    dropout, masks = nn.Dropout(0.5), []
    weight = nn.Parameter(Tensor(np.ones((1, 400), np.float32)))

    def loss(x):
        y = ops.concat([dropout(x * weight), dropout(x * weight)])
        masks.extend((y.asnumpy() != 0).reshape(2, -1))
        return y.mean()

    from mindnlp.core import optim

    # Two updates of two micro steps.
    step = dp.make_train_step(loss, optim.SGD([weight], lr=0.0), [weight], accumulation_steps=2)
    for _ in range(4):
        step((Tensor(np.ones((1, 400), np.float32)),))
    assert len(masks) == 8
    everybody = np.stack([mask for ranks in group.all_gather_object(masks) for mask in ranks])
    assert len(np.unique(everybody, axis=0)) == 8 * group.world_size
    # Two independent masks agree in about half of their elements.
    agreeing = (everybody[:, None] == everybody[None]).mean(2)[~np.eye(len(everybody), dtype=bool)]
    assert abs(agreeing - 0.5).max() < 0.15
