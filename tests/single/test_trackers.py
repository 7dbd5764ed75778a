"""Test that trackers get every step of a run once, also of one that was stopped and resumed, by reading them back."""

from __future__ import annotations

import gc
import importlib.util

import pytest
from library import is_0_5
from mindnlp.engine import TrainerCallback

import mindnlp_dp as dp
from mindnlp_dp.training.trainer import trackers
from models import Rows, tiny_roberta, train

pytestmark = pytest.mark.skipif(is_0_5, reason="Transformers has its own trackers")


class Stop(TrainerCallback):
    """Ends the process's training as an error would, after an update whose log was reported."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise InterruptedError


def run(folder, name, **more):
    dp.init_process_group()
    return train(
        tiny_roberta(), Rows(16), folder, per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1,
        save_strategy="steps", save_steps=2, evaluation_strategy="epoch", eval_dataset=Rows(4), report_to=name, **more,
    )  # fmt: skip


def tensorboard_curves(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run_folder,) = (folder / "trackers").glob("*/tensorboard")
    events = EventAccumulator(str(run_folder), purge_orphaned_data=False)
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow_curves(folder):
    import json

    import mlflow

    (file,) = (folder / "trackers").glob("*/mlflow.json")
    number, client = json.loads(file.read_text())["id"], mlflow.MlflowClient()
    keys = client.get_run(number).data.metrics
    return {key: [(m.step, m.value) for m in client.get_metric_history(number, key)] for key in keys}


def swanlab_curves(folder):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = {}
    for file in sorted((folder / "swanlog").glob("*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for content in reader:
            record = Record()
            record.ParseFromString(content)
            if record.HasField("scalar"):
                found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    return found


CURVES = {"tensorboard": tensorboard_curves, "mlflow": mlflow_curves, "swanlab": swanlab_curves}


@pytest.mark.parametrize("name", CURVES)
def test_a_resumed_run_continues_its_curves(tmp_path, monkeypatch, name):
    package = trackers.TRACKERS[name][1]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")

    def curves(folder, *runs):
        monkeypatch.setenv("SWANLAB_LOG_DIR", str(folder / "swanlog"))
        for callbacks in runs:
            if callbacks:
                with pytest.raises(InterruptedError):
                    run(folder, name, callbacks=callbacks)
            else:
                trainer = run(folder, name, resume=True if len(runs) > 1 else None)
        trainer.callback_handler.callbacks[-1]._finish()
        return CURVES[name](folder), trainer

    whole, trainer = curves(tmp_path / "whole", [])
    expected = {}
    for row in trainer.state.log_history:
        for key, value in trackers.curves_of(row).items():
            expected.setdefault(key, []).append((row["step"], pytest.approx(value, rel=1e-6)))
    for key in ("train/loss", "train/learning_rate", "eval/loss"):
        assert sorted(whole[key]) == expected[key]
    resumed, _ = curves(tmp_path / "resumed", [Stop()], [])
    assert sorted(resumed["train/loss"]) == expected["train/loss"]
    assert sorted(resumed["eval/loss"]) == expected["eval/loss"]


def test_a_report_ends_with_its_trainer(tmp_path, monkeypatch):
    seen = []

    class Recording:
        def __init__(self, run):
            pass

        def log(self, values, step):
            seen.extend(name for name in values if name == "eval/loss")

        def finish(self):
            seen.append("finished")

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", (Recording, "json"))
    trainer = run(tmp_path, "mlflow")
    trainer.evaluate()
    assert seen == ["eval/loss"] * 3
    del trainer
    gc.collect()
    assert seen[3:] == ["finished"]


def test_unknown_tracker_names_are_refused():
    assert trackers.tracker_names(None) == trackers.tracker_names("none") == trackers.tracker_names(["none"]) == []
    with pytest.raises(ValueError, match="report_to names 'wandb', expected tensorboard, swanlab, mlflow"):
        trackers.tracker_names("wandb")


def test_a_tracker_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", (trackers.MLflow, "no_such_package"))
    with pytest.raises(ValueError, match="needs the package no_such_package, which is not installed: pip install"):
        run(tmp_path, "mlflow")


def test_a_tracker_that_fails_does_not_end_training(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, run):
            pass

        def log(self, values, step):
            raise ConnectionError("no network")

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", (Broken, "json"))
    with pytest.warns(RuntimeWarning, match="mlflow does not log this run any more: ConnectionError: no network"):
        assert run(tmp_path, "mlflow").state.global_step == 8
