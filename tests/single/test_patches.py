"""Tests each patch in a new interpreter, because this one cannot undo imports and their side effects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mindnlp_dp.compat import common
from mindnlp_dp.runtime.versions import UnsupportedVersionsError, check_versions
from models import tiny_config


def run(code, **environ):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environ})


@pytest.mark.parametrize("mindspore", ["2.7.0", "2.7.1.post1", "2.8.0", "2.8.3", "2.9.0", "2.10.0", "2.10.1"])
def test_tested_versions_give_no_warning(mindspore):
    assert check_versions("0.4.1", mindspore) == ""


@pytest.mark.parametrize("mindspore", ["2.8.0", "2.8.3"])
def test_tested_versions_with_mindnlp_0_5_give_no_warning(mindspore):
    assert check_versions("0.5.1", mindspore) == ""


@pytest.mark.core
@pytest.mark.parametrize(
    ("mindnlp", "mindspore"),
    [
        ("0.4.1", "2.11.0"), ("0.4.1", "2.11.0rc1"), ("0.4.1", "3.0.0"), ("0.5.1", "2.9.0"), ("0.5.1", "2.10.0"),
        ("0.5.2", "2.8.0"), ("0.5.10", "2.11.0"),
    ],
)  # fmt: skip
def test_newer_versions_give_a_warning_that_names_the_tested_ones(mindnlp, mindspore):
    warning = check_versions(mindnlp, mindspore)
    assert f"MindNLP {mindnlp} with MindSpore {mindspore} is newer than the tested versions" in warning
    assert "MindNLP 0.4.1 with MindSpore 2.7.0 to 2.10.x" in warning
    assert "\n" not in warning


@pytest.mark.core
@pytest.mark.parametrize(
    ("mindnlp", "mindspore"),
    [
        ("0.4.1", "2.4.1"), ("0.4.1", "2.5.0"), ("0.4.1", "2.6.0"), ("0.5.1", "2.7.0"), ("0.5.0", "2.8.0"),
        ("0.3.1", "2.7.0"), ("0.6.0", "2.10.0"),
    ],
)  # fmt: skip
def test_unsupported_versions_are_refused_with_the_supported_ones(mindnlp, mindspore):
    with pytest.raises(UnsupportedVersionsError) as caught:
        check_versions(mindnlp, mindspore)
    message = str(caught.value)
    assert f"MindNLP {mindnlp} with MindSpore {mindspore} is not supported" in message
    assert "MindNLP 0.4.1 with MindSpore 2.7.0 to 2.10.x" in message
    assert issubclass(UnsupportedVersionsError, ImportError)


def test_versions_are_checked_when_mindnlp_is_imported():
    code = """
import importlib.metadata, mindnlp_dp
importlib.metadata.version = {"mindnlp": "0.4.1", "mindspore": "2.6.0"}.__getitem__
import mindnlp
"""
    done = run(code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mindnlp_dp.runtime.versions.UnsupportedVersionsError: MindNLP 0.4.1 with MindSpore 2.6.0")


@pytest.mark.parametrize("rank", ["", "0", "1"])
def test_only_the_first_rank_warns_of_newer_versions(monkeypatch, capsys, rank):
    versions = {"mindnlp": "0.4.1", "mindspore": "2.11.0"}
    monkeypatch.setattr(common.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    list(common._check_versions(None))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (rank != "1")
    assert all("2.11.0 is newer than the tested versions" in line for line in lines)


def test_the_launcher_and_optim_import_neither_mindspore_nor_mindnlp_nor_numpy():
    done = run(
        "import sys, mindnlp_dp as dp, mindnlp_dp.commands.main, mindnlp_dp.launch.processes.worker\n"
        "assert 'Muon' in dp.optim.__all__\n"
        "print([m for m in sys.modules if m.startswith('minds') or m == 'numpy'])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_mindnlp_first_is_refused():
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


def test_the_stock_trainer_trains_and_evaluates_without_warnings(tmp_path):
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


def test_the_variable_multi_npu_starts_seeds_and_shards_nothing():
    done = run(MULTI_NPU, MULTI_NPU="true")
    assert done.stdout.strip().endswith("not started"), done.stderr


def test_patched_operators_work():
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


def test_lazily_initialized_parameters_are_trained():
    import mindspore
    from mindnlp.core import nn, ops
    from mindspore.common.initializer import initializer

    parameter = nn.Parameter(initializer("ones", 3))
    assert parameter.asnumpy().tolist() == [1, 1, 1]
    zero = mindspore.Tensor(0.0)
    gradient = ops.ones_like(parameter)
    ops.optim.raw_sgd(parameter, gradient, mindspore.Tensor(0.5), 0.0, 0.0, False, gradient * 0, zero, gradient)
    assert parameter.asnumpy().tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_an_optimizer_with_a_loaded_state_dict_continues_bitwise_equal(name):
    import mindspore
    from mindnlp.core import nn, optim

    def steps(load_after):
        parameter = nn.Parameter(mindspore.Tensor([0.1, -0.2, 0.3]))
        optimizer = getattr(optim, name)([parameter], lr=0.01)
        for step in range(6):
            if step == load_after:
                state = optimizer.state_dict()
                optimizer = getattr(optim, name)([parameter], lr=0.01)
                optimizer.load_state_dict(state)
            parameter.grad = mindspore.Tensor([0.1, -0.3, 0.7]) * (step + 1)
            optimizer.step()
        return parameter.asnumpy().tolist()

    assert steps(load_after=3) == steps(load_after=None)


def test_the_bias_of_a_tied_output_layer_is_trained():
    import mindspore
    from mindnlp.core import ops
    from mindnlp.transformers import RobertaForMaskedLM

    bias = RobertaForMaskedLM(tiny_config()).lm_head.decoder.bias
    ones, zero = ops.ones_like(bias), mindspore.Tensor(0.0)
    ops.optim.raw_sgd(bias, ones, mindspore.Tensor(0.5), 0.0, 0.0, False, ones * 0, zero, ones)
    assert set(bias.asnumpy().tolist()) == {-0.5}


def test_a_deep_copy_of_a_model_has_its_own_weights():
    import copy

    import mindspore
    from mindnlp.core import nn, ops

    linear = nn.Linear(2, 2)
    linear.tied, linear.bias.requires_grad = linear.weight, False
    copied = copy.deepcopy(linear)
    assert copied.tied is copied.weight
    assert not copied.bias.requires_grad
    before, ones = linear.weight.asnumpy().copy(), ops.ones_like(linear.weight)
    assert (copied.weight.asnumpy() == before).all()
    ops.optim.raw_sgd(
        copied.weight, ones, mindspore.Tensor(0.5), 0.0, 0.0, False, ones * 0, mindspore.Tensor(0.0), ones
    )
    assert (linear.weight.asnumpy() == before).all()
    assert (copied.weight.asnumpy() == before - 0.5).all()


def test_every_patch_is_registered(pytestconfig):
    """Check that every patch file is imported; otherwise its patches are never applied."""
    folder = pytestconfig.rootpath / "mindnlp_dp" / "compat"
    files = {
        ".".join(path.relative_to(folder.parent.parent).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    }
    # Patches for the other MindNLP version are imported only where it is installed.
    code = """
import sys, mindnlp_dp, mindnlp_dp.compat.mindnlp_0_4, mindnlp_dp.compat.mindnlp_0_5
print(*sorted(m for m in sys.modules if m.startswith("mindnlp_dp.compat.")))
"""
    done = run(code)
    assert len(files) > 5
    assert files <= set(done.stdout.split())
