"""Tests the closed forms of the speed-up laws, and what a report computes from measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scaling import LAWS, fit, plot, print_report
from theory.speedup import amdahl_speedup, gustafson_speedup, parallel_fraction, throughput

WAYS = [way for way, _ in LAWS.values()]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_devices", [1, 2, 7, 64])
def test_amdahl_and_gustafson_match_their_closed_forms(num_devices, fraction):
    amdahl, gustafson = amdahl_speedup(num_devices, fraction), gustafson_speedup(num_devices, fraction)
    assert amdahl == pytest.approx(num_devices / (num_devices * (1 - fraction) + fraction))
    assert gustafson == pytest.approx(num_devices - (1 - fraction) * (num_devices - 1))
    # The laws agree for one device and for fully parallel work; otherwise growing work gains more.
    assert gustafson >= amdahl - 1e-12
    if num_devices > 1:
        assert parallel_fraction(num_devices, amdahl) == pytest.approx(fraction)
        assert parallel_fraction(num_devices, gustafson, "gustafson") == pytest.approx(fraction)


def test_speed_up_laws_have_their_limits_for_many_devices():
    assert amdahl_speedup(1e12, 0.95) == pytest.approx(20)
    assert gustafson_speedup(1e6, 0.95) == pytest.approx(950_000.05)
    assert throughput(400, 8, 0.5) == 1600


@pytest.mark.parametrize("call", [lambda: amdahl_speedup(0, 0.5), lambda: gustafson_speedup(2, 1.5)])
def test_invalid_numbers_of_devices_and_fractions_are_refused(call):
    with pytest.raises(ValueError, match="expected 1 device or more and a fraction from 0 to 1"):
        call()


def test_parallel_fraction_refuses_one_device_and_unknown_laws():
    with pytest.raises(ValueError, match="a fraction needs 2 devices or more"):
        parallel_fraction(1, 1.0)
    with pytest.raises(ValueError, match='law must be "amdahl" or "gustafson", got \'moore\''):
        parallel_fraction(2, 1.5, "moore")


def test_the_scaling_report_fits_the_fractions_of_both_laws(capsys, tmp_path):
    """Check that measurements that follow the laws give their fractions, and that those above the laws give 1."""
    rates = {
        n: {"global batch stays": 100 * amdahl_speedup(n, 0.9), "rank's batch stays": 100 * gustafson_speedup(n, 0.95)}
        for n in (1, 2, 4)
    }
    fitted = fit(rates)
    assert fitted["amdahl"]["fraction"] == pytest.approx(0.9)
    assert fitted["gustafson"]["fraction"] == pytest.approx(0.95)
    print_report(fitted)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Amdahl: the global batch stays; parallel fraction 90.00 %, fitted at 4 ranks"
    assert " ".join(lines[3].split()) == "1 100 samples/s 1.00 x 100.0 % 100 samples/s 1.00 x"
    assert " ".join(lines[5].split()) == "4 308 samples/s 3.08 x 76.9 % 308 samples/s 3.08 x"
    # Eight devices were not measured.
    assert " ".join(lines[6].split()) == "8 - - - 471 samples/s 4.71 x"
    plot(fitted, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    better = {1: dict.fromkeys(rates[1], 100.0), 2: dict.fromkeys(rates[1], 220.0)}
    assert fit(better)["amdahl"]["fraction"] == 1.0


def test_no_speed_up_is_predicted_if_two_ranks_are_slower_than_one(capsys):
    fitted = fit({1: dict.fromkeys(WAYS, 100.0), 2: dict.fromkeys(WAYS, 80.0)})
    print_report(fitted)
    said = capsys.readouterr().out
    assert said.count("note: 2 ranks are slower than one, so no parallel fraction fits, and no prediction is made") == 2
    assert [line.split()[0] for line in said.splitlines() if line[:7].strip().isdigit()] == ["1", "2"] * 2
    assert said.count("parallel fraction 0.00 %") == 2


@pytest.mark.slow
def test_the_script_measures_both_laws(tmp_path):
    script = Path(__file__).resolve().parents[2] / "homework" / "scaling.py"
    command = [sys.executable, str(script), "--batch", "4", "--updates", "2", "--json", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    laws = json.loads((tmp_path / "out.json").read_text())["laws"]
    assert {law: sorted(found["speedups"]) for law, found in laws.items()} == {law: ["1", "2"] for law in LAWS}
