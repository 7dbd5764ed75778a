"""Tests the algorithms of the course on threads: what they compute, what they send, and how they are explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from algorithms import plot, table_rows
from theory.all_reduce import ALGORITHMS, ParameterServer, broadcast, parameter_server_all_reduce, reduce
from theory.costs import CostModel, fit, traffic
from theory.endpoint import run_ranks
from theory.explain import explain

HOMEWORK = Path(__file__).resolve().parents[2] / "homework"
WORLD_SIZES = range(1, 9)
LENGTHS = [0, 1, 2, 7, 64, 1001]


def arrays(world_size, length):
    return [
        np.random.default_rng([rank, length]).integers(-9, 9, length).astype(np.float32) for rank in range(world_size)
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_all_reduce_returns_the_sum_and_its_traffic_equals_the_formula(algorithm, world_size, length):
    mine = arrays(world_size, length)
    before = [array.copy() for array in mine]
    results, endpoints = run_ranks(world_size, lambda endpoint: ALGORITHMS[algorithm](endpoint, mine[endpoint.rank]))
    for result in results:
        np.testing.assert_array_equal(result, np.sum(before, axis=0, dtype=np.float32))
    for array, original in zip(mine, before):
        np.testing.assert_array_equal(array, original)
    for rank, endpoint in enumerate(endpoints):
        expected = traffic(algorithm, rank, world_size, length)
        if world_size == 1:
            assert (endpoint.bytes_sent, endpoint.messages_sent) == (0, 0)
        else:
            assert (endpoint.bytes_sent, endpoint.messages_sent) == (expected.num_bytes, expected.num_messages)
    # Every byte and message that is sent is also received.
    assert sum(e.bytes_sent for e in endpoints) == sum(e.bytes_received for e in endpoints)
    assert sum(e.messages_sent for e in endpoints) == sum(e.messages_received for e in endpoints)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_ring_rank_sends_two_times_n_minus_1_over_n(world_size):
    """Check that a rank sends exactly this if N divides the array, and that all ranks together always send 2(N-1)."""
    for rank in range(world_size):
        assert traffic("ring", rank, world_size, 840).num_bytes == 2 * (world_size - 1) * 840 * 4 // world_size
        assert traffic("ring", rank, world_size, 840).num_messages == 2 * (world_size - 1)
    for length in LENGTHS:
        everyone = sum(traffic("ring", rank, world_size, length).num_bytes for rank in range(world_size))
        assert everyone == 2 * (world_size - 1) * length * 4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("root", [0, -1])
def test_reduce_sums_on_the_root_and_broadcast_copies_from_it(world_size, root):
    root %= world_size
    mine = arrays(world_size, 5)
    reduced, _ = run_ranks(world_size, lambda endpoint: reduce(endpoint, mine[endpoint.rank], root))
    np.testing.assert_array_equal(reduced[root], np.sum(mine, axis=0))
    assert all(result is None for rank, result in enumerate(reduced) if rank != root)
    sent, _ = run_ranks(world_size, lambda endpoint: broadcast(endpoint, mine[endpoint.rank], root))
    for result in sent:
        np.testing.assert_array_equal(result, mine[root])


@pytest.mark.parametrize("world_size", range(2, 6))
@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_parameter_server_trains_the_weights_of_one_process(world_size, num_servers):
    """Run gradient descent on a sum of squares as one process does, and count the traffic of a single server."""
    targets, start = arrays(world_size, 11), np.zeros(11, np.float32)

    def train(endpoint):
        server = ParameterServer(endpoint, start, num_servers)
        for _ in range(3):
            gradient = server.pull() - targets[endpoint.rank]
            server.push(gradient, lambda shard, total: shard - np.float32(0.125) * total)
        return server.pull()

    expected = start
    for _ in range(3):
        expected = expected - np.float32(0.125) * sum(expected - target for target in targets)
    results, endpoints = run_ranks(world_size, train)
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    if num_servers == 1:
        # The server sends C bytes of parameters to each other rank in each of four pulls.
        assert endpoints[0].bytes_sent == 4 * 11 * 4 * (world_size - 1)
        assert endpoints[0].bytes_received == 3 * 11 * 4 * (world_size - 1)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_one_parameter_server_per_rank_sends_as_much_as_a_ring(world_size):
    """Check that every rank then sends as much as in a ring."""
    length = 840

    def run(endpoint):
        return parameter_server_all_reduce(endpoint, np.ones(length, np.float32), num_servers=world_size)

    results, endpoints = run_ranks(world_size, run)
    assert all((result == world_size).all() for result in results)
    for rank, endpoint in enumerate(endpoints):
        assert endpoint.bytes_sent == traffic("ring", rank, world_size, length).num_bytes


def test_an_invalid_number_of_parameter_servers_is_refused():
    with pytest.raises(ValueError, match="num_servers must be from 1 to 2, the world size, got 3"):
        run_ranks(2, lambda endpoint: ParameterServer(endpoint, np.zeros(4), 3))


def test_an_error_of_one_rank_ends_all_ranks_and_is_raised():
    def fails(endpoint):
        if endpoint.rank == 2:
            raise KeyError("broken")
        return ALGORITHMS["ring"](endpoint, np.ones(9))

    with pytest.raises(KeyError, match="broken"):
        run_ranks(3, fails)


RING_OF_FOUR = """\
ring, 4 ranks. The array is split into 4 chunks. Every rank sends to its right neighbor only, all of them at once.
In brackets: the ranks whose numbers a message holds the sum of.

scatter-reduce 1 of 3
  rank 0 ── chunk 0 [0] ──▶ rank 1
  rank 1 ── chunk 1 [1] ──▶ rank 2
  rank 2 ── chunk 2 [2] ──▶ rank 3
  rank 3 ── chunk 3 [3] ──▶ rank 0

scatter-reduce 2 of 3
  rank 0 ── chunk 3 [0+3] ──▶ rank 1
  rank 1 ── chunk 0 [0+1] ──▶ rank 2
  rank 2 ── chunk 1 [1+2] ──▶ rank 3
  rank 3 ── chunk 2 [2+3] ──▶ rank 0

scatter-reduce 3 of 3
  rank 0 ── chunk 2 [0+2+3] ──▶ rank 1
  rank 1 ── chunk 3 [0+1+3] ──▶ rank 2
  rank 2 ── chunk 0 [0+1+2] ──▶ rank 3
  rank 3 ── chunk 1 [1+2+3] ──▶ rank 0

all-gather 1 of 3
  rank 0 ── chunk 1 [0+1+2+3] ──▶ rank 1
  rank 1 ── chunk 2 [0+1+2+3] ──▶ rank 2
  rank 2 ── chunk 3 [0+1+2+3] ──▶ rank 3
  rank 3 ── chunk 0 [0+1+2+3] ──▶ rank 0

all-gather 2 of 3
  rank 0 ── chunk 0 [0+1+2+3] ──▶ rank 1
  rank 1 ── chunk 1 [0+1+2+3] ──▶ rank 2
  rank 2 ── chunk 2 [0+1+2+3] ──▶ rank 3
  rank 3 ── chunk 3 [0+1+2+3] ──▶ rank 0

all-gather 3 of 3
  rank 0 ── chunk 3 [0+1+2+3] ──▶ rank 1
  rank 1 ── chunk 0 [0+1+2+3] ──▶ rank 2
  rank 2 ── chunk 1 [0+1+2+3] ──▶ rank 3
  rank 3 ── chunk 2 [0+1+2+3] ──▶ rank 0

Now every rank holds the sum of [0+1+2+3].
rank 0 sent 6 messages, 1.50 times the array
rank 1 sent 6 messages, 1.50 times the array
rank 2 sent 6 messages, 1.50 times the array
rank 3 sent 6 messages, 1.50 times the array"""


def test_explain_prints_the_ring_of_four_ranks():
    assert explain("ring", 4) == RING_OF_FOUR


def test_explain_prints_the_star_of_three_ranks():
    lines = explain("reduce_broadcast", 3).splitlines()
    assert lines[3:10] == [
        "reduce",
        "  rank 1 ── array [1] ──▶ rank 0",
        "  rank 2 ── array [2] ──▶ rank 0",
        "",
        "broadcast",
        "  rank 0 ── array [0+1+2] ──▶ rank 1",
        "  rank 0 ── array [0+1+2] ──▶ rank 2",
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_explanations_of_every_algorithm_state_the_sum(algorithm, world_size):
    text = explain(algorithm, world_size)
    assert f"Now every rank holds the sum of [{'+'.join(map(str, range(world_size)))}]." in text


def test_the_cost_model_is_fitted_and_predicts_in_closed_form():
    true = CostModel(5e-6, 1e-9, 2e-10)
    sizes = [4, 1000, 10_000, 1_000_000]
    latency, per_byte = fit(sizes, [true.message(size) for size in sizes])
    assert latency == pytest.approx(5e-6)
    assert per_byte == pytest.approx(1e-9)
    assert true.predict("ring", 4, 4000) == pytest.approx(6 * (5e-6 + 1000e-9) + 3 * 1000 * 2e-10)
    assert true.predict("reduce_broadcast", 4, 4000) == pytest.approx(6 * (5e-6 + 4000e-9) + 3 * 4000 * 2e-10)
    # The star's time grows with the number of ranks; the ring's hardly grows for large arrays.
    assert true.predict("ring", 64, 1e9) / true.predict("ring", 2, 1e9) < 2.1
    assert true.predict("reduce_broadcast", 64, 1e9) / true.predict("reduce_broadcast", 2, 1e9) == pytest.approx(63)


def test_measurements_become_table_rows_and_a_plot(tmp_path):
    def job(world_size):
        sent = {
            name: [
                [traffic(name, rank, world_size, 1000).num_messages, traffic(name, rank, world_size, 1000).num_bytes]
                for rank in range(world_size)
            ]
            for name in ALGORITHMS
        }
        models = {"one at a time": [1e-6, 1e-9, 0], "all at once": [2e-6, 2e-9, 0]}
        measured = {name: [{"bytes": 4000, "seconds": 1e-3, "sent": sent[name]}] for name in ALGORITHMS}
        return {"world_size": world_size, "models": models, "algorithms": measured}

    rows = table_rows(job(2)) + table_rows(job(4))
    assert all(row["equals_formula"] for row in rows)
    ring = next(row for row in rows if (row["algorithm"], row["world_size"]) == ("ring", 4))
    assert (ring["bytes_sent"], ring["messages_sent"]) == (6000, 6)
    assert ring["predicted_seconds"] == pytest.approx(6 * (2e-6 + 1000 * 2e-9))
    wrong = job(2)
    wrong["algorithms"]["ring"][0]["sent"][0][1] += 4
    assert [row["equals_formula"] for row in table_rows(wrong)].count(False) == 1
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_course_scripts_do_not_import_mindspore():
    code = "import sys, algorithms, algorithms_job, scaling; assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HOMEWORK)


def script(name, *args, **options):
    done = subprocess.run(
        [sys.executable, str(HOMEWORK / name), *args], capture_output=True, text=True, timeout=100, **options
    )
    return done.returncode, done.stdout, done.stderr


def test_the_script_explains_an_algorithm_from_any_folder(tmp_path):
    assert script("algorithms.py", "--explain", "ring", "--nproc", "4", cwd=tmp_path) == (0, RING_OF_FOUR + "\n", "")


def test_a_closed_output_pipe_gives_no_traceback():
    line = f'"{sys.executable}" "{HOMEWORK}/algorithms.py" --explain ring --nproc 60 | head -1'
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("ring, 60 ranks.")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("algorithms.py", ["--explain", "tree"], "argument --explain: invalid choice: 'tree' (choose from "),
        ("algorithms.py", ["--nproc", "1"], "argument --nproc: must be a number of at least 2, got 1"),
        ("algorithms.py", ["--bytes", "1k"], "argument --bytes: must be a number of at least 4, got 1k"),
        ("scaling.py", ["--nproc", "1"], "argument --nproc: must be a number of at least 2, got 1"),
        ("scaling.py", ["--updates", "0"], "argument --updates: must be a number of at least 1, got 0"),
    ],
)
def test_invalid_arguments_of_the_scripts_are_refused(name, arguments, said):
    code, output, errors = script(name, *arguments)
    assert (code, output) == (2, "")
    assert errors.splitlines()[-1].startswith(f"{name}: error: {said}")


def test_the_script_measures_and_plots_all_algorithms(tmp_path):
    files = ["--json", "out/rows.json", "--plot", "out/plot.png"]
    code, table, _ = script("algorithms.py", "--nproc", "2", "3", "--bytes", "4096", "1000", *files, cwd=tmp_path)
    assert code == 0
    assert "DIFFERS" not in table
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())["rows"]
    assert len(rows) == len(ALGORITHMS) * 2 * 2
    assert all(row["equals_formula"] and row["seconds"] > 0 and row["predicted_seconds"] > 0 for row in rows)
    assert (tmp_path / "out" / "plot.png").read_bytes()[:4] == b"\x89PNG"
