"""Test the central promise: N processes with batch B/N train the same model as one process with batch B.

The tolerance covers float32 sums in a different order. SGD does not amplify these errors: after five
steps, weights agree to 2e-6. AdamW divides a gradient by its own magnitude, so a gradient that is
only rounding noise becomes a step of the size of the learning rate. This happens to the biases of
the attention keys, which do not influence the softmax: they may differ by steps * learning rate,
and all other weights by 5e-5.
"""

from __future__ import annotations

import numpy as np
import pytest

from models import Rows, alone, tiny_roberta, train, weights

pytestmark = pytest.mark.core

GLOBAL_BATCH = 8
NUM_SAMPLES = 4 * GLOBAL_BATCH + 3  # five updates, the last one uneven on every number of ranks above 1
LEARNING_RATE = 1e-2
NUM_STEPS = 5


@pytest.mark.parametrize(("optim", "tolerance"), [("sgd", 2e-6), ("adamw", 5e-5)])
@pytest.mark.parametrize(
    "divided", [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 2, "gradient_accumulation_steps": 2}]
)
def test_n_ranks_with_batch_b_over_n_equal_one_process_with_batch_b(group, tmp_path, optim, tolerance, divided):
    settings = {"optim": optim, "learning_rate": LEARNING_RATE, "logging_steps": 1}
    micro_batch = GLOBAL_BATCH // group.world_size // divided.get("gradient_accumulation_steps", 1)
    together = train(
        tiny_roberta(seed=3),
        Rows(NUM_SAMPLES),
        tmp_path / "together",
        per_device_train_batch_size=micro_batch,
        **divided,
        **settings,
    )
    with alone():
        single = train(
            tiny_roberta(seed=3), Rows(NUM_SAMPLES), tmp_path, per_device_train_batch_size=GLOBAL_BATCH, **settings
        )
    assert together.state.global_step == single.state.global_step == NUM_STEPS

    expected = weights(single.model)
    start = weights(tiny_roberta(seed=3))
    moved = max(np.abs(expected[name] - start[name]).max() for name in start)
    assert moved > 100 * tolerance  # training moved the weights far more than the tolerance
    for name, weight in weights(together.model).items():
        limit = (
            NUM_STEPS * LEARNING_RATE if name.endswith("attention.self.key.bias") and optim == "adamw" else tolerance
        )
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=limit, err_msg=name)

    for mine, theirs in zip(together.state.log_history, single.state.log_history):
        assert mine.get("loss") == pytest.approx(theirs.get("loss"), abs=1.1e-4)  # logged with four digits
        assert mine.get("grad_norm") == pytest.approx(theirs.get("grad_norm"), rel=1e-3)
