"""Tests that MindSpore's deterministic mode is set where it is wanted, once, and before communication starts."""

from __future__ import annotations

import mindspore
import pytest
from mindspore._c_expression import DeviceManagerConf

from mindnlp_dp.finetuning.settings import InputError, ParallelConfig, parse_config
from mindnlp_dp.runtime import determinism
from mindnlp_dp.runtime.determinism import check_deterministic, choose_deterministic
from mindnlp_dp.training import initialize


@pytest.fixture
def calls(monkeypatch):
    """Return what MindSpore is told; the mode of this process stays as it is."""
    found = []
    monkeypatch.setattr(mindspore, "set_deterministic", found.append)
    monkeypatch.delenv(determinism.VARIABLE, raising=False)
    return found


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        ("auto", "Ascend", [True]), ("auto", "GPU", []), ("auto", "CPU", []),
        (True, "Ascend", [True]), (True, "GPU", [True]), (True, "CPU", []),
        (False, "Ascend", []), (False, "GPU", []), (False, "CPU", []),
    ],
)  # fmt: skip
def test_deterministic_mode_is_on_by_default_only_on_ascend(calls, wanted, device, expected):
    choose_deterministic(check_deterministic(wanted), device)
    assert calls == expected


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("true", "auto", True), ("1", "auto", True), ("False", "auto", False), ("0", "auto", False),
        ("auto", "auto", "auto"), ("", "auto", "auto"), ("false", True, True), ("true", False, False),
    ],
)  # fmt: skip
def test_the_deterministic_environment_variable_replaces_auto(monkeypatch, text, wanted, expected):
    monkeypatch.setenv(determinism.VARIABLE, text)
    found = check_deterministic(wanted)
    # 1 == True, and 1 is not a valid result.
    assert (found, type(found)) == (expected, type(expected))


def test_invalid_values_of_deterministic_are_refused(monkeypatch):
    for wrong in ("on", 1, None):
        with pytest.raises(ValueError, match='deterministic must be True, False or "auto", got'):
            check_deterministic(wrong)
    monkeypatch.setenv(determinism.VARIABLE, "strict")
    with pytest.raises(ValueError, match="MINDNLP_DP_DETERMINISTIC=strict must be one of true, 1, false, 0, auto"):
        check_deterministic("auto")


def test_deterministic_mode_set_by_the_script_is_kept(calls, monkeypatch):
    class Configured:
        @staticmethod
        def is_deterministic_configured():
            return True

    monkeypatch.setattr(DeviceManagerConf, "get_instance", Configured)
    assert choose_deterministic(True, "Ascend") is None
    assert calls == []


def test_mindspore_checks_for_a_second_call_of_set_deterministic():
    """Check what :func:`choose_deterministic` avoids; MindSpore 2.7 to 2.10 have the same check."""
    import inspect

    assert "is_deterministic_configured()" in inspect.getsource(mindspore.set_deterministic)
    assert not DeviceManagerConf.get_instance().is_deterministic_configured()


def test_deterministic_mode_is_set_after_the_device_and_before_communication(calls, monkeypatch):
    order = []

    class StoppedError(Exception):
        pass

    def connect(*_):
        order.append("connect")
        raise StoppedError

    monkeypatch.setattr(initialize, "current_group", lambda: None)
    monkeypatch.setattr(initialize, "set_device_from_env", lambda: order.append("device") or "Ascend")
    monkeypatch.setattr(mindspore, "set_deterministic", order.append)
    monkeypatch.setattr(initialize, "choose_backend", lambda *_: "mindspore")
    monkeypatch.setattr(initialize, "connect", connect)
    with pytest.raises(StoppedError):
        initialize.init_process_group()
    assert order == ["device", True, "connect"]


def test_the_recipes_accept_the_deterministic_flag():
    assert parse_config(ParallelConfig, []).deterministic == "auto"
    assert parse_config(ParallelConfig, ["--deterministic", "false"]).deterministic == "false"
    with pytest.raises(InputError, match="deterministic must be one of auto, true, false, got 'maybe'"):
        parse_config(ParallelConfig, ["--deterministic", "maybe"])
