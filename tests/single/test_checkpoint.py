"""Tests checkpoints as files: each is complete or refused, and no code in them runs."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from library import Stop, TrainerCallback
from safetensors.numpy import load_file

import mindnlp_dp as dp
from mindnlp_dp.checkpoint import collective_save, folder_lock
from mindnlp_dp.checkpoint.background import BackgroundWriter
from mindnlp_dp.checkpoint.collective_save import NewCheckpoint, write_together
from mindnlp_dp.checkpoint.directory import (
    checkpoint_path,
    checkpoints_in,
    has_checkpoints,
    newest_checkpoint,
    remove_old_checkpoints,
    remove_unfinished_checkpoints,
)
from mindnlp_dp.checkpoint.folder_lock import lock_folder
from mindnlp_dp.checkpoint.manifest import CheckpointError, RunId, check_checkpoint, run_of
from mindnlp_dp.checkpoint.reader import read_state, read_weights
from mindnlp_dp.checkpoint.state_tree import pack_state, unpack_state
from mindnlp_dp.checkpoint.writer import write_checkpoint, write_weights
from mindnlp_dp.runtime.atomic_write import link_or_copy
from mindnlp_dp.runtime.named_weights import named_weights
from mindnlp_dp.runtime.shard_bounds import split_evenly
from mindnlp_dp.runtime.sharded_array import FlatLayout, Shard, ShardedArray
from models import Rows, tiny_config, tiny_roberta, train, weights


@pytest.fixture(autouse=True)
def group():
    return dp.init_process_group()


RUN = RunId("0123456789abcdef", 1)


def write(path, state=None, run=RUN):
    write_checkpoint(
        path,
        {"step": 1} if state is None else state,
        lambda folder: (folder / "model.safetensors").write_bytes(b"weights"),
        run,
    )


# Trees.

numbers = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
types = st.sampled_from(["float32", "float64", "float16", "int64", "uint32", "bool"])
arrays = hnp.arrays(types, hnp.array_shapes(min_dims=0, min_side=0))
trees = st.recursive(
    numbers | arrays,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=12,
)


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


@given(trees)
def test_a_state_tree_is_read_as_it_was_written(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("c") / "checkpoint-1"
    write(path, {"tree": tree})
    assert_equal(unpack_state(read_state(path))["tree"], tree)


@pytest.mark.parametrize(("first", "second"), [("a/b", None), (0, "0"), ("a", "a/")])
def test_state_keys_with_the_same_path_keep_their_own_arrays(tmp_path, first, second):
    one, two = np.array([1.0]), np.array([2.0])
    tree = {first: one, "a": {"b": two}} if second is None else {first: one, second: two}
    write(tmp_path / "checkpoint-1", {"tree": tree})
    assert_equal(unpack_state(read_state(tmp_path / "checkpoint-1"))["tree"], tree)


def in_pieces(array, layout, num_pieces):
    """Return the array as ``num_pieces`` pieces that one rank has, some of them empty or twice."""
    parts = (
        [array]
        if layout.shard is None
        else [layout.shard.part(array, i, layout.num_shards) for i in range(layout.num_shards)]
    )
    flat = np.concatenate([part.reshape(-1) for part in parts])
    ends = [split_evenly(len(flat), num_pieces, part) for part in range(num_pieces)]
    pieces = [(start, flat[start:stop]) for start, stop in ends]
    return ShardedArray(layout, "float32", [*pieces, (0, flat[:1]), (len(flat), flat[:0])])


def save_shards(path, state, group, background=None, write_model=lambda folder: None):
    new = NewCheckpoint(path, state, lambda workspace: write_model, RUN, lambda: None)
    write_together(new, group, saves=True, sharded=True, background=background)
    if background is not None:
        background.wait()


@pytest.mark.parametrize("num_pieces", [1, 2, 5])
@pytest.mark.parametrize(
    "layout",
    [
        FlatLayout((3, 5)), FlatLayout(()), FlatLayout((0, 4)), FlatLayout((7, 2), Shard(0), 3),
        FlatLayout((4, 6), Shard(1, 2), 2), FlatLayout((2, 3), Shard(1), 4), FlatLayout((9,), Shard(0, 3), 2),
    ],
)  # fmt: skip
def test_a_sharded_state_is_read_as_full_arrays(group, tmp_path, layout, num_pieces):
    array = np.random.default_rng(0).normal(size=layout.shape).astype(np.float32)
    state = {"a": [in_pieces(array, layout, num_pieces)], "n": 3}
    for number, background in enumerate((None, BackgroundWriter(group))):
        save_shards(tmp_path / f"checkpoint-{number}", state, group, background)
        back = unpack_state(read_state(tmp_path / f"checkpoint-{number}"))
        np.testing.assert_array_equal(back["a"][0].asnumpy(), array)
        assert back["n"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-0", "checkpoint-1"]


def test_a_checkpoint_with_a_missing_shard_is_reported_as_damaged(group, tmp_path):
    layout = FlatLayout((3, 5))
    whole = in_pieces(np.ones((3, 5), np.float32), layout, 5)
    for gone in range(5):
        some = ShardedArray(layout, "float32", [piece for number, piece in enumerate(whole.pieces) if number != gone])
        save_shards(tmp_path / "checkpoint-1", {"a": some}, group)
        with pytest.raises(CheckpointError, match="damaged: its state: ValueError: no file holds element"):
            check_checkpoint(tmp_path / "checkpoint-1")
    save_shards(tmp_path / "checkpoint-1", {"a": whole}, group)
    check_checkpoint(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "state-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="state-00001-of-00001.safetensors is missing"):
        check_checkpoint(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_sharded_save_leaves_no_files(group, tmp_path, is_async):
    state = {"a": in_pieces(np.ones((3, 5), np.float32), FlatLayout((3, 5)), 2)}
    background = BackgroundWriter(group) if is_async else None

    def fail(folder):
        raise OSError("the model cannot be written")

    for _ in range(2):
        with pytest.raises(OSError, match="the model cannot"):
            save_shards(tmp_path / "checkpoint-1", state, group, background, fail)
    assert list(tmp_path.iterdir()) == []
    save_shards(tmp_path / "checkpoint-1", state, group, background)
    check_checkpoint(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("sharded", [False, True])
def test_the_async_writer_keeps_no_reference_to_the_state(group, tmp_path, monkeypatch, sharded):
    """The copy is enough: a thread that had the arrays as well would double the memory."""
    may_write, publish = threading.Event(), collective_save.publish_checkpoint

    def slowly(*arguments):
        assert may_write.wait(60)
        publish(*arguments)

    monkeypatch.setattr(collective_save, "publish_checkpoint", slowly)
    array = np.ones((3, 5), np.float32)
    kept = weakref.ref(array)
    state = {"a": in_pieces(array, FlatLayout((3, 5)), 2) if sharded else array}
    background = BackgroundWriter(group)
    new = NewCheckpoint(tmp_path / "checkpoint-1", state, lambda workspace: lambda folder: None, RUN, lambda: None)
    write_together(new, group, saves=True, sharded=sharded, background=background)
    background.complete()
    del array, state, new
    gc.collect()
    assert kept() is None
    assert background.is_busy
    may_write.set()
    background.wait()
    check_checkpoint(tmp_path / "checkpoint-1")


def test_a_checkpoint_is_written_at_once_if_no_thread_can_start(group, tmp_path, monkeypatch):
    refused = []

    def fail(thread):
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    array, background = np.arange(15, dtype=np.float32).reshape(3, 5), BackgroundWriter(group)
    monkeypatch.setattr(threading.Thread, "start", fail)
    save_shards(tmp_path / "checkpoint-1", {"a": in_pieces(array, FlatLayout((3, 5)), 2)}, group, background)
    assert refused == ["mindnlp_dp-checkpoint"]
    assert not background.is_busy
    np.testing.assert_array_equal(unpack_state(read_state(tmp_path / "checkpoint-1"))["a"].asnumpy(), array)


@pytest.mark.parametrize("has_links", [True, False])
def test_replacing_a_file_leaves_its_hard_links_unchanged(tmp_path, monkeypatch, has_links):
    old, backup, new = (tmp_path / name for name in ("old", "backup", "new"))
    old.write_text("old")
    os.link(old, backup)
    new.write_text("new")
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    for _ in range(2):
        link_or_copy(new, old)
    assert (old.read_text(), backup.read_text(), new.read_text()) == ("new", "old", "new")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool_"])
def test_tensors_in_a_checkpoint_keep_their_dtype_and_values(tmp_path, dtype):
    import mindspore

    largest = 2.5e20 if dtype in ("float32", "bfloat16") else 3.0
    tensor = mindspore.Tensor(np.array([[0.0, 1.0, largest]]), getattr(mindspore, dtype))
    write(tmp_path / "checkpoint-1", {"t": tensor, "scalar": mindspore.Tensor(2.5)})
    back = unpack_state(read_state(tmp_path / "checkpoint-1"))
    assert back["t"].dtype == tensor.dtype
    assert back["scalar"].shape == ()
    assert (back["t"].astype(mindspore.float32).asnumpy() == tensor.astype(mindspore.float32).asnumpy()).all()


def test_objects_that_need_pickle_are_refused_with_their_path():
    with pytest.raises(TypeError, match="'optimizer/state/0' is a set, which a checkpoint cannot hold"):
        pack_state({"optimizer": {"state": [{1, 2}]}})
    with pytest.raises(TypeError, match="'value' is a function"):
        pack_state(lambda: 0)


# Folders.


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    train(tiny_roberta(), Rows(8), tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    files = sorted(path for path in (tmp_path / "checkpoint-1").iterdir())
    assert [path.name for path in files] == [
        "checkpoint.json", "config.json", "model.safetensors", "state.safetensors", "trainer_state.json",
    ]  # fmt: skip
    for path in files:
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(path.read_bytes())


@pytest.mark.core
def test_plain_mindnlp_loads_the_weights_of_a_checkpoint(tmp_path):
    from mindnlp.transformers import RobertaForSequenceClassification

    trainer = train(tiny_roberta(), Rows(8), tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    loaded = RobertaForSequenceClassification.from_pretrained(str(tmp_path / "checkpoint-1"))
    for name, weight in weights(loaded).items():
        np.testing.assert_array_equal(weight, weights(trainer.model)[name], err_msg=name)


def test_a_failed_write_keeps_the_old_checkpoint_and_no_partial_one(tmp_path):
    write(tmp_path / "checkpoint-1", {"n": 1})

    def fail(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path / "checkpoint-1", {"n": 2}, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert unpack_state(read_state(tmp_path / "checkpoint-1")) == {"n": 1}


@pytest.mark.core
@pytest.mark.parametrize("moment", ["while it writes", "between the two renames"])
def test_a_killed_writer_leaves_the_old_checkpoint_complete(tmp_path, moment):
    """Kill a separate process with SIGKILL; the next run removes what it left."""
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from mindnlp_dp.checkpoint.writer import write_checkpoint

        def die(*args):
            os.kill(os.getpid(), signal.SIGKILL)

        path = Path(sys.argv[1]) / "checkpoint-3"
        write_checkpoint(path, {{"n": 1}}, lambda f: (f / "model.safetensors").write_bytes(b"1"))
        if {moment == "while it writes"}:
            write_model = lambda f: ((f / "model.safetensors").write_bytes(b"half"), die())
        else:
            write_model = lambda f: (f / "model.safetensors").write_bytes(b"2")
            Path.replace = die
        write_checkpoint(path, {{"n": 2}}, write_model)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    remove_unfinished_checkpoints(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint-3"]
    assert unpack_state(read_state(tmp_path / "checkpoint-3")) == {"n": 1}


@pytest.mark.core
def test_a_checkpoint_is_flushed_to_disk_before_it_is_renamed(tmp_path, monkeypatch):
    """Flush the renamed folder and its subfolders first: a file name is on the disk only when its folder is flushed."""
    events = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source, target):
        events.append("renamed")
        # These paths were flushed under the old name.
        events[:-1] = [path.relative_to(source) for path in events[:-1]]
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)

    def write_model(folder):
        (folder / "tokenizer").mkdir()
        for name in ("model.safetensors", "tokenizer/vocab.json"):
            (folder / name).write_bytes(b"1")

    write_checkpoint(tmp_path / "checkpoint-1", {"n": 1}, write_model)
    renamed = events.index("renamed")
    written = [path.relative_to(tmp_path / "checkpoint-1") for path in (tmp_path / "checkpoint-1").rglob("*")]
    assert sorted(events[:renamed]) == sorted([Path("."), *written])
    assert events[renamed + 1 :] == [tmp_path]


def shard(path):
    path.write_bytes(path.read_bytes()[:-3])


def nest_deeply(checkpoint):
    manifest = checkpoint / "checkpoint.json"
    deep = "[" * 10**5 + "]" * 10**5
    manifest.write_text(manifest.read_text().replace('"state": {', f'"state": {{"deep": {deep}, '))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewrite(checkpoint, change):
    """Apply ``change`` to the checkpoint's manifest and write it back."""
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    change(manifest)
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda c: (c / "checkpoint.json").unlink(), "has no checkpoint.json, so no run can be resumed from it"),
        (lambda c: shard(c / "checkpoint.json"), "checkpoint.json is damaged: JSONDecodeError"),
        (lambda c: (c / "checkpoint.json").write_text("[]"), "checkpoint.json is damaged: TypeError"),
        (lambda c: (c / "checkpoint.json").write_text('{"files": {}, "format": 99}'), "is of format 99"),
        (lambda c: shard(c / "state.safetensors"), "state.safetensors has .* bytes, .* were written"),
        (lambda c: flip(c / "state.safetensors"), "state.safetensors is not what was written, its hash differs"),
        (lambda c: (c / "model.safetensors").unlink(), "model.safetensors is missing"),
        (
            lambda c: rewrite(c, lambda manifest: manifest["files"]["model.safetensors"].pop("bytes")),
            "checkpoint.json is damaged: expected bytes and xxh3_128 of 'model.safetensors', got {'xxh3_128': ",
        ),
        (
            lambda c: rewrite(c, lambda manifest: manifest["files"].update({"model.safetensors": 7})),
            "checkpoint.json is damaged: expected bytes and xxh3_128 of 'model.safetensors', got 7",
        ),
        (
            lambda c: rewrite(c, lambda manifest: manifest.update(files=[])),
            "checkpoint.json is damaged: files is a list, expected the names of files",
        ),
        (
            lambda c: rewrite(c, lambda manifest: manifest["files"].update({"../x": {"bytes": 1, "xxh3_128": ""}})),
            "checkpoint.json is damaged: '../x' is not a file in the folder",
        ),
        (
            lambda c: rewrite(c, lambda manifest: manifest["files"].update({"/x": {"bytes": 1, "xxh3_128": ""}})),
            "checkpoint.json is damaged: '/x' is not a file in the folder",
        ),
        (
            lambda c: (c / "model-extra.safetensors").write_bytes(b"1"),
            "model-extra.safetensors was not written with it",
        ),
        (
            lambda c: rewrite(c, lambda manifest: manifest["state"].update(a={"$array": "b"})),
            "state.safetensors lacks 'b', which checkpoint.json names",
        ),
        (
            nest_deeply,
            "checkpoint.json is damaged: RecursionError",
        ),
        (lambda c: rewrite(c, lambda manifest: manifest.pop("state")), "checkpoint.json is damaged: it has no state"),
        (
            lambda c: rewrite(c, lambda manifest: manifest["files"].pop("state.safetensors")),
            "checkpoint.json is damaged: files has no state.safetensors",
        ),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path, harm, message):
    write(tmp_path / "checkpoint-9", {"a": np.ones(3)})
    write(tmp_path / "checkpoint-10", {"a": np.ones(3)})
    harm(tmp_path / "checkpoint-10")
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(tmp_path / "checkpoint-10")
    with pytest.warns(RuntimeWarning, match="checkpoint-10.* it is skipped, and checkpoint-9 is used"):
        assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-9"


def test_checkpoints_are_listed_by_step_without_other_files(tmp_path):
    for step in (2, 10, 9):
        write(checkpoint_path(tmp_path, step))
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    assert checkpoints_in(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, [], [1, 2, 3, 4]), (0, [], [1, 2, 3, 4]), (-1, [], [1, 2, 3, 4]), (9, [], [1, 2, 3, 4]), (2, [], [3, 4]),
        (1, [4], [4]), (2, [1, 4], [1, 4]), (1, [2, 4], [2, 4]), (3, [1], [1, 3, 4]), (1, [1], [1]),
    ],
)  # fmt: skip
def test_save_total_limit_removes_the_oldest_checkpoints(tmp_path, limit, keep, left):
    for step in (1, 2, 3, 4):
        write(checkpoint_path(tmp_path, step))
    remove_old_checkpoints(tmp_path, limit, [checkpoint_path(tmp_path, step) for step in keep], RUN, step=4)
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-{step}" for step in left]


def test_removing_a_linked_checkpoint_keeps_the_target_of_the_link(tmp_path):
    write(tmp_path / "elsewhere" / "checkpoint-1")
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere" / "checkpoint-1")
    write(tmp_path / "checkpoint-2")
    remove_old_checkpoints(tmp_path, 1, [], RUN, step=2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "elsewhere"]
    check_checkpoint(tmp_path / "elsewhere" / "checkpoint-1")


@pytest.mark.core
def test_files_not_written_by_mindnlp_dp_are_never_removed(tmp_path):
    folders = [
        ".checkpoint-4-mine", ".checkpoint-4-abcdefgh", ".checkpoint-files-mine", ".checkpoint-2-removed",
        ".mindnlp_dp-checkpoint-4-mine", ".mindnlp_dp-checkpoint-notes", "checkpoint-x", "checkpoint-2 (copy)",
        "checkpoint-1", "checkpoint-2",
    ]  # fmt: skip
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "note").write_text("mine")
    for name in (".lock", "checkpoint-3"):
        (tmp_path / name).write_text("mine")
    with pytest.warns(RuntimeWarning, match="checkpoint-2 is not a checkpoint of mindnlp_dp, and is kept as .*-2-kept"):
        train_until(tmp_path, 4, save_steps=1, save_total_limit=1, async_save=True)
    has_checkpoints(tmp_path)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-4"]
    kept = {f"checkpoint-{step}": f"checkpoint-{step}-kept" for step in (1, 2, 3)}
    for name in folders:
        assert (tmp_path / kept.get(name, name) / "note").read_text() == "mine"
    for name in (".lock", "checkpoint-3"):
        assert (tmp_path / kept.get(name, name)).read_text() == "mine"
    assert len(os.listdir(tmp_path)) == len(folders) + 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint-500", r"/checkpoint-500 does not exist; .* has checkpoint-2, checkpoint-4$"),
        ("other/checkpoint-500", r"/other/checkpoint-500 does not exist$"),
        ("", r"is a folder of checkpoints, not a checkpoint: .*\(checkpoint-2, checkpoint-4\), or pass True"),
        ("empty", r"/empty is empty, so it is not a checkpoint$"),
        ("checkpoint-2/model.safetensors", r"model.safetensors is a file, and a checkpoint is a folder$"),
        ("unreadable", r"/unreadable/checkpoint.json could not be read: Is a directory$"),
        ("of-mindnlp", r"/of-mindnlp has no checkpoint.json, .*: it was saved by MindNLP's own Trainer, or in part"),
    ],
)
def test_resuming_from_a_path_that_is_not_a_checkpoint_is_refused(tmp_path, capsys, name, message):
    for step in (2, 4):
        write(tmp_path / f"checkpoint-{step}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unreadable" / "checkpoint.json").mkdir(parents=True)
    (tmp_path / "of-mindnlp").mkdir()
    (tmp_path / "of-mindnlp" / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        train_until(tmp_path, 4, resume=str(tmp_path / name))
    assert "resuming from" not in capsys.readouterr().out


def test_the_error_for_a_missing_relative_path_names_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"out/checkpoint-5 does not exist in {tmp_path}$"):
        train_until(tmp_path, 4, resume="out/checkpoint-5")


# Several runs in a folder.


def train_until(folder, step, **settings):
    settings = {"max_steps": step, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, **settings}
    return train(tiny_roberta(), Rows(64), folder, **settings)


def test_a_run_resumes_from_and_removes_only_its_own_checkpoints(tmp_path, capsys):
    train_until(tmp_path, 8, save_total_limit=2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-6", "checkpoint-8"]
    with pytest.warns(RuntimeWarning, match="holds checkpoint-8 of an earlier run, and this one begins with update 0"):
        train_until(tmp_path, 4, save_total_limit=2, seed=5)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    resumed = train_until(tmp_path, 6, save_total_limit=2, seed=5, resume=True)
    assert f"resuming from {tmp_path}/checkpoint-4" in capsys.readouterr().out
    assert resumed.state.global_step == 6
    # The resumed run replaces the first run's checkpoint-6.
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert run_of(tmp_path / "checkpoint-4") == run_of(tmp_path / "checkpoint-6") != run_of(tmp_path / "checkpoint-8")
    assert [run_of(tmp_path / f"checkpoint-{step}").number for step in (4, 8)] == [2, 1]


@pytest.mark.core
@pytest.mark.parametrize("stop_at", [3, 5], ids=["stopped before its first save", "stopped after a save"])
def test_resume_continues_the_run_that_restarted_from_an_earlier_checkpoint(tmp_path, capsys, stop_at):
    train_until(tmp_path, 8)
    # A run that cannot be resumed there does not go back.
    with pytest.raises(ValueError, match="num_samples was 64 and is 32"):
        train(tiny_roberta(), Rows(32), tmp_path, max_steps=8, resume=str(tmp_path / "checkpoint-4"), save_steps=2,
              save_strategy="steps")  # fmt: skip
    settings = {"learning_rate": 1e-4, "save_total_limit": 2}
    with pytest.raises(KeyboardInterrupt):
        train_until(tmp_path, 8, resume=str(tmp_path / "checkpoint-2"), callbacks=[Stop(stop_at)], **settings)
    capsys.readouterr()
    train_until(tmp_path, 12, resume=True, **settings)
    assert f"resuming from {tmp_path}/checkpoint-{stop_at - 1}\n" in capsys.readouterr().out
    # checkpoint-6 and checkpoint-8 were replaced; those of the new run are limited, and none is of the abandoned one.
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-10", "checkpoint-12"]
    assert [run_of(path).number for path in checkpoints_in(tmp_path)] == [2, 2]


def test_a_run_resumed_from_an_earlier_run_has_the_newest_checkpoint(tmp_path):
    train_until(tmp_path, 4)
    train_until(tmp_path, 2, seed=5)
    train_until(tmp_path, 6, resume=str(tmp_path / "checkpoint-4"))
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-6"


def test_a_resumed_run_without_updates_does_not_change_the_newest_checkpoint(tmp_path):
    train_until(tmp_path, 4)
    train_until(tmp_path, 2, resume=str(tmp_path / "checkpoint-2"))
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


def test_save_total_limit_removes_damaged_checkpoints_first(tmp_path):
    train_until(tmp_path, 8)
    (tmp_path / "checkpoint-8" / "model.safetensors").write_bytes(b"half")
    with pytest.warns(RuntimeWarning, match="checkpoint-8 is damaged"):
        train_until(tmp_path, 7, resume=True, save_steps=1, save_total_limit=3)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-4", "checkpoint-6", "checkpoint-7"]
    assert len({run_of(path) for path in checkpoints_in(tmp_path)}) == 1


def test_a_run_resumed_into_another_folder_gets_a_new_run_id(tmp_path):
    train_until(tmp_path / "first", 2)
    train_until(tmp_path / "second", 4, resume=str(tmp_path / "first" / "checkpoint-2"))
    runs = [run_of(tmp_path / "first" / "checkpoint-2"), run_of(tmp_path / "second" / "checkpoint-4")]
    assert runs[0].name != runs[1].name


class Scores:
    """A metric with the given values."""

    def __init__(self, *scores):
        self.scores = iter(scores)

    def __call__(self, prediction):
        return {"score": next(self.scores)}


def train_with_scores(folder, last, scores, **settings):
    return train_until(
        folder, last, save_steps=1, evaluation_strategy="steps", eval_steps=1, eval_dataset=Rows(4),
        compute_metrics=Scores(*scores), load_best_model_at_end=True, metric_for_best_model="score", **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def best_is_2(tmp_path_factory):
    dp.init_process_group()
    folder = tmp_path_factory.mktemp("best") / "first"
    assert Path(train_with_scores(folder, 3, [0.1, 0.9, 0.3]).state.best_model_checkpoint).name == "checkpoint-2"
    return folder


@pytest.mark.parametrize("where", ["moved", "copied", "copied in part", "linked", "relative"])
def test_the_best_checkpoint_is_found_in_a_moved_copied_or_linked_folder(tmp_path, best_is_2, monkeypatch, where):
    shutil.copytree(best_is_2, tmp_path / "old" / "out")
    folder = tmp_path / "new"
    train_with_scores(tmp_path / "old" / "out", 4, [0.2], resume=True)
    if where == "moved":
        (tmp_path / "old" / "out").rename(folder)
    elif where == "copied":
        shutil.copytree(tmp_path / "old" / "out", folder)
    elif where == "copied in part":
        shutil.copytree(tmp_path / "old" / "out" / "checkpoint-4", folder / "checkpoint-4")
        train_with_scores(folder, 5, [0.4], resume=True, save_total_limit=1)
        assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-5"]
        shutil.copytree(tmp_path / "old" / "out" / "checkpoint-2", folder / "checkpoint-2")
    elif where == "linked":
        folder.symlink_to(tmp_path / "old" / "out")
    else:
        monkeypatch.chdir(tmp_path / "old")
        folder = Path("out")
    trainer = train_with_scores(folder, 6, [0.4, 0.5], resume=True, save_total_limit=2)
    assert trainer.state.best_model_checkpoint == str(folder / "checkpoint-2")
    assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-2", "checkpoint-6"]
    best = load_file(folder / "checkpoint-2" / "model.safetensors")
    np.testing.assert_array_equal(weights(trainer.model)["classifier.dense.weight"], best["classifier.dense.weight"])


def test_the_best_checkpoint_is_found_in_the_folder_where_the_run_began(tmp_path, best_is_2):
    second = tmp_path / "second"
    # Another run's checkpoint with the best one's name.
    write(second / "checkpoint-2", run=RunId("another run", 1))
    train_with_scores(second, 4, [0.4], resume=str(best_is_2 / "checkpoint-3"))
    trainer = train_with_scores(second, 5, [0.2], resume=True)
    assert trainer.state.best_model_checkpoint == str(best_is_2 / "checkpoint-2")


def test_a_checkpoint_of_another_run_is_not_taken_for_the_best_checkpoint(tmp_path, best_is_2):
    shutil.copytree(best_is_2, tmp_path / "out")
    train_with_scores(tmp_path / "out", 4, [0.4], resume=True)
    train_until(tmp_path / "out", 2, seed=5, learning_rate=1e-2)
    with pytest.warns(RuntimeWarning, match="checkpoint-2, the best checkpoint so far"):
        trainer = train_with_scores(tmp_path / "out", 5, [0.2], resume=str(tmp_path / "out" / "checkpoint-4"))
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-5"


def test_resume_without_the_best_checkpoint_warns_and_forgets_its_score(tmp_path, best_is_2):
    shutil.copytree(best_is_2, tmp_path / "out")
    train_with_scores(tmp_path / "out", 4, [0.4], resume=True)
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    with pytest.warns(
        RuntimeWarning, match=r"checkpoint-2, the best checkpoint so far \(score: 0.9\), is not in .*/out"
    ):
        trainer = train_with_scores(tmp_path / "out", 6, [0.3, 0.2], resume=True)
    assert (trainer.state.best_metric, trainer.state.best_model_checkpoint) == (0.3, str(tmp_path / "out/checkpoint-5"))


def test_a_best_checkpoint_deleted_during_training_gives_a_warning(tmp_path):
    class Delete(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                shutil.rmtree(tmp_path / "checkpoint-1")

    with pytest.warns(RuntimeWarning, match="checkpoint-1, the best checkpoint, is not there any more"):
        train_with_scores(tmp_path, 2, [0.9, 0.1], callbacks=[Delete()])


def test_a_checkpoint_folder_is_locked_for_one_job(tmp_path):
    """Check that a second job waits for the folder's lock, and is refused if the first job does not end in time."""
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import sys, time
            from pathlib import Path
            from mindnlp_dp.checkpoint.folder_lock import lock_folder
            lock = lock_folder(Path(sys.argv[1]))
            print("locked", flush=True)
            sys.stdin.read()
        """), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "locked\n"
    workspace = tmp_path / ".mindnlp_dp-checkpoint-2-abcdefgh"
    workspace.mkdir()
    with pytest.raises(RuntimeError, match=f"another job is writing.*process {holder.pid} on .*its own output_dir"):
        lock_folder(tmp_path, wait_seconds=0.2)
    # A process that only looks for checkpoints removes nothing.
    assert not has_checkpoints(tmp_path)
    assert workspace.exists()
    holder.stdin.close()
    locks = [lock_folder(tmp_path), lock_folder(tmp_path)]
    assert holder.wait() == 0
    for lock in locks:
        assert (tmp_path / folder_lock.NAME).exists()
        lock.release()
        lock.release()
    assert not (tmp_path / folder_lock.NAME).exists()
    assert not has_checkpoints(tmp_path)
    assert not workspace.exists()


def test_the_trainer_refuses_an_output_folder_locked_by_another_job(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_try_to_lock", lambda folder: None)
    monkeypatch.setattr(folder_lock.lock_folder, "__defaults__", (0.0,))
    with pytest.raises(RuntimeError, match="another job is writing its checkpoints"):
        train_until(tmp_path, 2)
    train_until(tmp_path, 2, save_strategy="no")


# Weights.


def plain_module():
    from mindnlp.core import nn
    from mindspore import Tensor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("running", Tensor(np.random.rand(2).astype(np.float32)))

    return Net()


def tied_model():
    from mindnlp.transformers import RobertaForMaskedLM

    return RobertaForMaskedLM(tiny_config())


def cell():
    from mindspore import nn

    return nn.SequentialCell(nn.Dense(3, 2), nn.BatchNorm1d(2))


def lora():
    from mindnlp.peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_roberta(), LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"]))


@pytest.mark.parametrize("build", [plain_module, tied_model, cell, tiny_roberta])
def test_weights_of_modules_cells_and_tied_models_are_saved_and_loaded(tmp_path, build):
    model, other = build(), build()
    for _, weight in named_weights(other):
        weight.assign_value(weight * 0 + 3)
    write_weights(model, tmp_path)
    read_weights(other, tmp_path)
    assert dp.replica_digest(other) == dp.replica_digest(model)


def test_weights_in_several_safetensors_files_are_loaded(tmp_path):
    model, other = tiny_roberta(seed=1, num_layers=2), tiny_roberta(seed=2, num_layers=2)
    model.save_pretrained(str(tmp_path), max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    read_weights(other, tmp_path)
    assert dp.replica_digest(other) == dp.replica_digest(model)
    next(tmp_path.glob("model-00001*")).unlink()
    with pytest.raises(CheckpointError, match="does not hold '.*', which the model trains"):
        read_weights(other, tmp_path)


def save_with_trainer(model, folder):
    settings = {"per_device_train_batch_size": 4, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    dp.DataParallelTrainer(model, dp.DataParallelArguments(str(folder), **settings), train_dataset=Rows(4)).train()


def save_of_a_module(model, folder):
    dp.DataParallelTrainer(model, dp.DataParallelArguments(str(folder))).save_model()


def save_of_a_sharded_model(model, folder):
    from mindnlp_dp.parallel.placement import Placement
    from mindnlp_dp.parallel.weights.safetensors_files import bytes_of, file_header

    arrays = {name: weight.asnumpy() for name, weight in named_weights(model)}
    placements = [Placement(name, array.shape, str(array.dtype)) for name, array in arrays.items()]
    pieces = [bytes_of(arrays[p.name], p.dtype) for p in placements]
    (folder / "model.safetensors").write_bytes(b"".join([file_header(placements), *pieces]))


def save_of_mindnlp(model, folder):
    from mindnlp.core.serialization import save_model

    save_model(model, str(folder / "model.safetensors"), force_contiguous=False)


def save_of_a_custom_loop(model, folder):
    from mindnlp.core import optim

    loader = dp.make_loader(Rows(4), 4, seed=0)
    parameters = list(model.parameters())
    step = dp.make_train_step(lambda **inputs: model(**inputs).loss, optim.SGD(parameters, lr=0.1), parameters)
    dp.FunctionalRun(folder, model, step, loader).save()


@pytest.mark.parametrize(
    ("build", "save"),
    [
        (tiny_roberta, lambda model, folder: model.save_pretrained(str(folder))),
        (tiny_roberta, lambda model, folder: model.save_pretrained(str(folder), max_shard_size="5KB")),
        (tiny_roberta, save_with_trainer),
        (tiny_roberta, save_of_a_sharded_model),
        (tiny_roberta, save_of_a_custom_loop),
        (tiny_roberta, save_of_mindnlp),
        (plain_module, save_of_a_module),
        (cell, write_weights),
        (lora, lambda model, folder: model.save_pretrained(str(folder))),
        (lora, save_with_trainer),
    ],
)
def test_every_safetensors_file_names_the_format_that_transformers_requires(tmp_path, build, save):
    """Transformers 4 refuses model*.safetensors whose metadata does not name PyTorch, TensorFlow, Flax or MLX."""
    from safetensors import safe_open

    save(build(), tmp_path)
    files = [path for path in tmp_path.rglob("*.safetensors") if path.name != "state.safetensors"]
    assert files
    for path in files:
        with safe_open(path, "np") as file:
            assert file.keys()
            assert file.metadata() == {"format": "pt"}, path


def test_weights_of_another_model_are_refused(tmp_path):
    (tmp_path / "two").mkdir()
    write_weights(tiny_roberta(num_layers=2), tmp_path / "two")
    with pytest.raises(CheckpointError, match="holds 'roberta.encoder.layer.1.*', which the model does not have"):
        read_weights(tiny_roberta(num_layers=1), tmp_path / "two")
    with pytest.raises(CheckpointError, match="has no weights"):
        read_weights(tiny_roberta(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        read_weights(tiny_roberta(), tmp_path)


def test_resuming_from_a_save_only_model_checkpoint_is_refused(tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    train(tiny_roberta(), Rows(8), tmp_path, **settings)
    names = ["checkpoint.json", "config.json", "model.safetensors", "trainer_state.json"]
    assert sorted(os.listdir(tmp_path / "checkpoint-1")) == names
    with pytest.raises(CheckpointError, match="saved with save_only_model"):
        train(tiny_roberta(), Rows(8), tmp_path, resume=True, **settings)


def test_the_checkpoint_manifest_is_json_with_position_and_files(tmp_path):
    train(tiny_roberta(), Rows(8), tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    manifest = json.loads(Path(tmp_path / "checkpoint-2" / "checkpoint.json").read_text())
    position = {"epoch": 1, "update": 1, "epoch_done": False, "ending_epoch": False, "offset": 0}
    assert manifest["state"]["position"] == position
    assert manifest["state"]["global_batch_size"] == 8
    assert set(manifest["files"]) == {"config.json", "model.safetensors", "state.safetensors", "trainer_state.json"}
