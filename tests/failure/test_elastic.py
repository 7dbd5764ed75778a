"""Test elastic jobs, whose number of ranks changes."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from conftest import (
    CORE_UNDER_MPI,
    ROOT,
    TIMEOUT_SECONDS,
    job_command,
    run_job,
)

ELASTIC = ROOT / "tests/failure/elastic.py"
UPDATES = 40


def results(folder):
    with np.load(folder / "weights.npz") as weights:
        return json.loads((folder / "result.json").read_text()), dict(weights)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train with three ranks and no fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = run_job(folder, ELASTIC, folder, "--updates", UPDATES, "--seconds", 0, nproc=3)
    assert job.exit_code == 0, job.output
    return results(folder)


@pytest.mark.parametrize("backend", CORE_UNDER_MPI)
def test_an_elastic_job_shrinks_and_grows_and_trains_the_same_model(tmp_path, undisturbed, backend):
    exit_code, output = run_job(
        tmp_path, "--grow-after", 1, ELASTIC, tmp_path, "--updates", UPDATES, "--seconds", 0.2,
        "--fault", "kill@7:2", "--fault", "raise@20:0", nproc="1:3", backend=backend,
    )  # fmt: skip
    assert exit_code == 0, output
    found, weights = results(tmp_path)
    expected, whole = undisturbed
    assert len(found["sizes"]) == UPDATES
    assert found["sizes"][:5] == [3] * 5
    assert min(found["sizes"][5:]) < 3
    assert found["sizes"][-1] == 3
    for name, weight in whole.items():
        # AdamW amplifies rounding differences with every update.
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=2e-3, err_msg=name)
    # Growing is not recorded as a failure.
    failures = [json.loads(line) for line in (tmp_path / "logs/failures.jsonl").read_text().splitlines()]
    assert [failure["restart"] for failure in failures] == [1, 2]
    assert "the job continues with 2 of 3 ranks" in output
    assert "the job continues with 3 of 3 ranks" in output
    if backend == "mpi":
        # The job that resumes with fewer ranks keeps the global batch.
        assert "training with the checkpoint's global batch of 12 samples" in output
    assert expected["sizes"] == [3] * UPDATES


@pytest.mark.slow
def test_scale_batch_makes_elastic_batches_proportional_to_the_number_of_ranks(tmp_path):
    """Every epoch reads every sample once, in smaller batches while a rank is missing."""
    exit_code, output = run_job(
        tmp_path, "--grow-after", 1, "--scale-batch", ELASTIC, tmp_path, "--updates", UPDATES, "--seconds", 0.2,
        "--fault", "kill@7:2", nproc="2:3",
    )  # fmt: skip
    assert exit_code == 0, output
    assert "training with global batches of 8 samples, and 0.667 times the learning rate" in output
    sizes = results(tmp_path)[0]["sizes"]
    assert len(sizes) > UPDATES
    assert sizes[0] == sizes[-1] == 3
    epochs = read = 0
    for size in sizes:
        read += 4 * size
        if read >= 48:
            epochs, read = epochs + 1, 0
    assert (epochs, read) == (UPDATES * 12 // 48, 0)


def test_an_elastic_job_keeps_its_minimum_size_and_ends_after_repeated_failures(tmp_path):
    exit_code, output = run_job(tmp_path, "import sys\nsys.exit(5)\n", nproc="2:3")
    assert exit_code == 5
    assert output.count("the job continues with 2 of 3 ranks") == 2
    assert "3 attempts in a row have not finished a single update" in output


def test_forked_ranks_start_like_new_processes(tmp_path):
    """Check the tool of these tests: umask, unbuffered output, the end by a signal, and another PYTHONPATH."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/of_the_user.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint('imported before:', 'mindnlp.engine' in sys.modules)\n"
        "open(sys.argv[1], 'w').close()\n__import__(sys.argv[2])\nos.kill(os.getpid(), 9)\n"
    )
    path = os.pathsep.join([str(tmp_path / "modules"), os.environ["PYTHONPATH"]])
    for name, module, other in (("as it is", "json", {}), ("elsewhere", "of_the_user", {"PYTHONPATH": path})):
        job = subprocess.run(
            job_command(tmp_path, "script.py", name, module, nproc=1), cwd=tmp_path, env={**os.environ, **other},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o027, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
        assert job.returncode == 137, job.stdout
        assert f"imported before: {not other}" in job.stdout
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640
