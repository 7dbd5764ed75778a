"""Test async_save: a thread writes the same checkpoints while training continues."""

from __future__ import annotations

import errno
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from library import is_0_5

import mindnlp_dp as dp
from mindnlp_dp.checkpoint import collective_save
from mindnlp_dp.checkpoint.directory import checkpoints_in
from mindnlp_dp.checkpoint.manifest import check_checkpoint
from mindnlp_dp.runtime.scratch_dir import MEMORY, ScratchDir
from models import Rows, tiny_roberta, train, weights

pytestmark = pytest.mark.skipif(is_0_5, reason="the Trainer of MindNLP 0.5 saves by the same code")
SETTINGS = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}


def run(folder, **more):
    dp.init_process_group()
    return train(tiny_roberta(dropout=0.1), Rows(16), folder, **{**SETTINGS, **more})


def left_in_memory():
    """Return the folders whose lock this process holds; other suites may write checkpoints at the same time."""
    files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [file for file in files if file.parent.name.startswith("mindnlp-dp-checkpoint-") and file.exists()]


def test_async_save_writes_the_same_checkpoints_and_a_run_resumes_from_them(tmp_path):
    whole = run(tmp_path / "sync")
    run(tmp_path / "async", async_save=True, save_total_limit=2)
    assert [path.name for path in checkpoints_in(tmp_path / "async")] == ["checkpoint-6", "checkpoint-8"]
    for name in ("checkpoint-6", "checkpoint-8"):
        files = [check_checkpoint(tmp_path / kind / name)["files"] for kind in ("sync", "async")]
        for file in ("model.safetensors", "config.json"):
            assert files[0][file] == files[1][file]
    assert not left_in_memory()
    resumed = run(tmp_path / "again", async_save=True, resume=str(tmp_path / "async" / "checkpoint-6"))
    for name, weight in weights(resumed.model).items():
        np.testing.assert_array_equal(weight, weights(whole.model)[name], err_msg=name)


@pytest.mark.core
def test_async_save_writes_checkpoints_while_training_continues(tmp_path, monkeypatch):
    from mindnlp.engine import TrainerCallback

    may_write, begun, updates = threading.Event(), [], []
    publish = collective_save.publish_checkpoint

    def slowly(files, path, *rest):
        begun.append(path.name)
        assert may_write.wait(60)
        publish(files, path, *rest)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            updates.append((state.global_step, len(begun), len(checkpoints_in(tmp_path))))
            if state.global_step == 4:
                may_write.set()

    monkeypatch.setattr(collective_save, "publish_checkpoint", slowly)
    run(tmp_path, async_save=True, callbacks=[Watch()])
    # Updates 3 and 4 are done while the first checkpoint is not there.
    assert updates[2:4] == [(3, 1, 0), (4, 1, 0)]
    assert begun == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert len(checkpoints_in(tmp_path)) == 4


def test_a_failed_async_save_stops_training_at_the_next_update(tmp_path, monkeypatch):
    failed, seen = threading.Event(), []

    def fail(*_):
        failed.set()
        raise OSError(errno.ENOSPC, "no space left on device")

    from mindnlp.engine import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                assert failed.wait(60)
            seen.append(state.global_step)

    monkeypatch.setattr(collective_save, "publish_checkpoint", fail)
    with pytest.raises(OSError, match="a checkpoint could not be written: OSError: .*no space left on device"):
        run(tmp_path, async_save=True, callbacks=[Watch()])
    assert seen == [0, 1, 2]
    assert not left_in_memory()


def test_async_save_waits_for_the_disk_if_memory_is_too_small(tmp_path, monkeypatch):
    write_files = collective_save.write_files

    def write_some(folder, *rest):
        outline = write_files(folder, *rest)
        if MEMORY in folder.parents:
            raise OSError(errno.ENOSPC, "no space left")
        return outline

    monkeypatch.setattr(collective_save, "write_files", write_some)
    with pytest.warns(RuntimeWarning, match="too little for a checkpoint; training waits until it is on the disk"):
        run(tmp_path, async_save=True)
    assert len(checkpoints_in(tmp_path)) == 4
    assert not list(tmp_path.glob(".*"))
    assert not left_in_memory()


def test_async_save_removes_memory_files_left_by_a_killed_process(tmp_path):
    """Nobody holds its lock; that of a checkpoint that is being written is held, in another container too."""
    lives = ScratchDir("checkpoint")
    gone = Path(tempfile.mkdtemp(prefix="mindnlp-dp-checkpoint-", dir=MEMORY))
    (gone / "lock").touch()
    run(tmp_path, async_save=True)
    assert not gone.exists()
    assert lives.path.exists()
    lives.remove()
