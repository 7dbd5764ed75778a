"""Test our CPU kernels on every rank: replicas agree, dropout differs by rank, cores do not change results."""

from __future__ import annotations

import numpy as np
import pytest
from mindnlp.core import nn, ops
from mindnlp.transformers import BertConfig, BertForSequenceClassification
from mindspore import Tensor

import mindnlp_dp as dp
from mindnlp_dp.kernels import dispatch, workers
from models import Rows, train

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
    trainer = train(
        model, Rows(640), tmp_path, per_device_train_batch_size=64, max_steps=3, learning_rate=1e-3, **settings
    )
    dp.assert_replicas_in_sync(model)
    return dp.replica_digest(model), trainer.state.log_history[-1]["train_loss"]


@pytest.mark.core
def test_the_number_of_cores_changes_no_bit(group, shared_tmp_path):
    digests = {trained(shared_tmp_path, "auto", num_cores)[0] for num_cores in (1, 2, 3)}
    assert len(digests) == 1


def test_cores_may_differ_by_rank(group, shared_tmp_path):
    alike, _ = trained(shared_tmp_path, "auto", 1)
    assert trained(shared_tmp_path, "auto", 1 + group.rank % 2)[0] == alike


def test_mindspores_own_train_the_same_model(group, shared_tmp_path):
    # Dropout is off, because our kernels and MindSpore's draw different masks.
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    CONFIG.update(off)
    try:
        ours, theirs = (trained(shared_tmp_path, kernels, 1)[1] for kernels in ("auto", "mindspore"))
    finally:
        for name in off:
            del CONFIG[name]
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.core
def test_every_call_of_dropout_on_every_rank_drops_others(group):
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
