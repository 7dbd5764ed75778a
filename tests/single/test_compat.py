"""Each patch in a new interpreter: imports and their side effects cannot be undone in this one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mindnlp_dp.compat import UnsupportedVersionsError, check_versions


def run(code, **environ):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environ})


@pytest.mark.parametrize("mindspore", ["2.7.0", "2.7.1.post1", "2.8.0", "2.8.3"])
def test_pairs_that_work(mindspore):
    check_versions("0.4.1", mindspore)


@pytest.mark.parametrize(
    ("mindnlp", "mindspore"), [("0.4.1", "2.9.0"), ("0.4.1", "2.10.0"), ("0.4.1", "2.4.1"), ("0.5.1", "2.7.0")]
)
def test_a_pair_that_does_not_work_is_named_with_those_that_do(mindnlp, mindspore):
    with pytest.raises(UnsupportedVersionsError) as caught:
        check_versions(mindnlp, mindspore)
    message = str(caught.value)
    assert f"MindNLP {mindnlp} with MindSpore {mindspore} is not a pair that works" in message
    assert "MindNLP 0.4.1 works with MindSpore 2.7.0 to 2.8.x" in message
    assert issubclass(UnsupportedVersionsError, ImportError)


def test_the_check_runs_when_mindnlp_is_imported():
    code = """
import mindnlp_dp.compat as compat
compat.importlib.metadata.version = {"mindnlp": "0.4.1", "mindspore": "2.10.0"}.__getitem__
import mindnlp
"""
    done = run(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "mindnlp_dp.compat.UnsupportedVersionsError: MindNLP 0.4.1 with MindSpore 2.10.0 is not a pair that works"
    )


def test_importing_the_package_costs_neither_mindspore_nor_mindnlp():
    done = run(
        "import sys, mindnlp_dp, mindnlp_dp.launch.cli; print([m for m in sys.modules if m.startswith('minds')])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_mindnlp_first_is_refused_with_the_fix():
    done = run("import sys, types; sys.modules['mindnlp'] = types.ModuleType('mindnlp'); import mindnlp_dp")
    assert "write `import mindnlp_dp` first" in done.stderr


TRAIN_STOCK = """
import mindnlp_dp  # nothing of it is used: MindNLP's own Trainer must train and evaluate
import numpy as np
from mindnlp.engine import Trainer, TrainingArguments
from mindspore.dataset import GeneratorDataset
from models import LENGTH, Rows, tiny_roberta
rows = Rows(8)
def pipeline():
    source = [(rows.input_ids[i], rows.labels[i]) for i in range(8)]
    return GeneratorDataset(source, ["input_ids", "labels"], shuffle=False)
settings = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "disable_tqdm": True}
args = TrainingArguments("/tmp/unused", **settings)
trainer = Trainer(tiny_roberta(), args, train_dataset=pipeline(), eval_dataset=pipeline())
assert np.isfinite(trainer.train().training_loss)
assert np.isfinite(trainer.evaluate()["eval_loss"])
"""


def test_the_stock_trainer_trains_and_evaluates_in_silence(tmp_path):
    done = run(TRAIN_STOCK.replace("/tmp/unused", str(tmp_path)), PYTHONPATH=os.path.dirname(os.path.dirname(__file__)))
    assert done.returncode == 0, done.stderr
    assert "deprecate" not in (done.stdout + done.stderr).lower()
    assert "WARNING" not in done.stdout + done.stderr
    assert "MS_ALLOC_CONF" not in done.stdout + done.stderr


MULTI_NPU = """
import os
import numpy as np
np.random.seed(3)
expected = np.random.rand(2)
np.random.seed(3)
import mindnlp_dp
import mindnlp.engine
from mindspore.communication.management import GlobalComm
from mindnlp.accelerate.utils.constants import accelerate_distributed_type
assert (np.random.rand(2) == expected).all(), "the import drew random numbers"
assert os.environ["MULTI_NPU"] == "true"
assert accelerate_distributed_type.name == "NO", accelerate_distributed_type
assert not GlobalComm.INITED
print("not started")
"""


def test_multi_npu_starts_seeds_and_shards_nothing():
    done = run(MULTI_NPU, MULTI_NPU="true")
    assert done.stdout.strip().endswith("not started"), done.stderr


def test_each_patched_thing_works():
    code = """
import mindnlp_dp
import mindspore, numpy as np
from mindnlp.core import nn, ops
assert ops.empty(2, 3).shape == ops.empty((2, 3)).shape == (2, 3)
assert nn.Parameter(mindspore.Tensor([1.0])).grad is None
assert mindspore.Tensor(1.5).repeat(3).asnumpy().tolist() == [1.5] * 3
assert mindspore.Tensor([1.0, 2.0]).repeat(2, 1).asnumpy().tolist() == [[1.0, 2.0], [1.0, 2.0]]
assert mindspore.dtype_to_nptype(mindspore.float32) is np.float32
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
