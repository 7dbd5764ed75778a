#!/usr/bin/env python3
"""Check every model class of the installed MindNLP that can be built small, and write the table of docs/models.md.

    python tests/models_matrix.py                    all families; fails where docs/models.md says otherwise
    python tests/models_matrix.py --core             four families, in a minute
    python tests/models_matrix.py --only bert gpt2   these
    python tests/models_matrix.py --write            all, and write the section of this MindNLP in docs/models.md

Two processes, one core each, check that all weights of a class have values, that forward and backward pass agree with
MindSpore's own kernels, that the weighted losses of the parts of a batch give the loss of the full batch, and that a
model that is saved and loaded has the same weights. Then one job of two ranks trains each class, and compares it with
one process. If a process dies, the class that it checked has failed, and a new process continues with the next class.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import mindnlp_dp as dp
from mindnlp_dp.runtime.versions import mindnlp_series

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "models.md"
CORE = ("bert", "gpt2", "llama", "t5")
NUM_WORKERS, NUM_ROWS = 2, 5
# A check above its limit is a failure of mindnlp-dp. MindSpore itself causes 2.2e-6 of the loss's limit: its
# cross-entropy of equal logits differs by so much from the logarithm of their number.
LIMITS = {
    "initialized": 0,
    "loss": 3e-6,
    "gradients": 1e-5,
    "weighted": 3e-6,
    "two ranks": 1e-5,
    "saved": 0,
}
HEADINGS = {
    "initialized": "matrices without values",
    "loss": "loss, to MindSpore's kernels",
    "gradients": "gradients, to MindSpore's kernels",
    "weighted": "losses of parts, weighted",
    "two ranks": "two ranks, AdamW",
    "saved": "saved and loaded",
}
UPSTREAM, OURS = "upstream fails", "ours fails"
SECONDS_A_CLASS = 60


# Functions of the processes that check.


def check(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """Check a class; yield each check's name with its number, or with the failure."""
    from small_models import batch, build, find

    model_class = find(name)
    try:
        model = build(model_class)
        columns = batch(model_class, model, NUM_ROWS)
    except Exception as error:  # noqa: BLE001, whatever a library raises is a row of the table
        yield "initialized", f"{UPSTREAM}: {sentence(error)}"
        return
    model.train()
    ids_before = {id(p) for p in model.parameters()}
    yield "initialized", sum(has_no_values(each, p) for each, p in model.named_parameters())
    try:
        expected, gradients = forward_and_backward(model, columns, "mindspore")
    except Exception as error:  # noqa: BLE001
        yield "loss", f"{UPSTREAM}: {sentence(error)}"
        return
    replaced = len(ids_before - {id(p) for p in model.parameters()})
    if replaced or not math.isfinite(expected):
        what = f"puts new parameters in the place of {replaced}" if replaced else f"ends with a loss of {expected}"
        yield "loss", f"{UPSTREAM}: its forward pass {what}"
        return
    loss, ours = forward_and_backward(model, columns, "auto")
    yield "loss", abs(loss - expected) / max(1.0, abs(expected))
    largest = max(1.0, *(float(np.abs(g).max()) for g in gradients if g is not None and g.size))
    yield "gradients", max(distances(gradients, ours), default=0.0) / largest
    yield "weighted", abs(loss_of_parts(model_class, model) - loss) / max(1.0, abs(loss))
    try:
        model.save_pretrained(str(folder))
        loaded = dict(type(model).from_pretrained(str(folder)).named_parameters())
    except Exception as error:  # noqa: BLE001
        yield "saved", f"{UPSTREAM}: {sentence(error)}"
        return
    saved = dict(model.named_parameters())
    yield "saved", max(distances(*([each[name].asnumpy() for name in loaded] for each in (loaded, saved))))


def has_no_values(name: str, weight: Any) -> bool:
    """Tell whether a weight has no memory, is not finite, or is zero where the model then cannot learn."""
    from mindnlp_dp.runtime.arrays import is_uninitialized
    from mindnlp_dp.training.uninitialized_weights import is_zero_by_mistake

    if is_uninitialized(weight) or not np.isfinite(weight.asnumpy()).all():
        return True
    return weight.ndim > 1 and is_zero_by_mistake(name, weight)


def forward_and_backward(model: Any, columns: Any, kernels: str) -> tuple[float, list[Any]]:
    from mindnlp_dp.data.batches import as_tensors
    from mindnlp_dp.kernels.dispatch import choose
    from mindnlp_dp.runtime.mindnlp_api import mindnlp_api
    from mindnlp_dp.runtime.random_state import seeded

    choose(kernels, 1)
    try:
        parameters = tuple(p for p in model.parameters() if p.requires_grad)
        run = mindnlp_api().autograd.value_and_grad(lambda **x: model(**x)[0], parameters, attach_grads=False)
        with seeded(5):
            loss, gradients = run(**as_tensors(columns))
        return float(loss.asnumpy()), [None if g is None else g.asnumpy() for g in gradients]
    finally:
        choose("auto", 1)


def loss_of_parts(model_class: Any, model: Any) -> float:
    """Return the mean loss of an evaluation in batches of two rows, and a last batch of one row."""
    from small_models import samples

    def predict(**columns: Any) -> Any:
        return model(**columns)[0], columns["input_ids"]

    loader = dp.make_loader(samples(model_class, model, NUM_ROWS), 2)
    return dp.evaluate(predict, loader, model=model, has_loss=True).loss


def distances(one: list[Any], other: list[Any]) -> list[float]:
    return [float(np.abs(a - b).max()) for a, b in zip(one, other) if a is not None and a.size]


def train_on_two_ranks(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """Train with all ranks, and in one process with the full batch; yield the largest difference of a weight."""
    from small_models import build, find, samples

    from models import alone, train, weights

    model_class, group = find(name), dp.get_process_group()
    rows = samples(model_class, build(model_class), 4 * group.world_size - 1)
    # With a smaller epsilon, gradients that are only rounding (as of a key's bias) would make full-size steps.
    more = {"optim": "adamw", "learning_rate": 1e-3, "adam_epsilon": 1e-4, "max_grad_norm": 1.0, "num_train_epochs": 1}
    mine = train(build(model_class), rows, folder, per_device_train_batch_size=2, **more)
    with alone():
        one = train(build(model_class), rows, folder, per_device_train_batch_size=2 * group.world_size, **more)
    if mine.state.global_step != 2 or one.state.global_step != 2:
        raise RuntimeError(f"{mine.state.global_step} and {one.state.global_step} updates, expected 2")
    before, found, expected = (list(weights(model).values()) for model in (build(model_class), mine.model, one.model))
    if max(distances(before, expected)) < 1e-4:
        raise RuntimeError("training changes nothing")
    yield "two ranks", max(distances(found, expected))


def sentence(error: BaseException) -> str:
    """Return the first line of an exception, cut to the length of a table cell."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"[|`]", "'", first)[:110].rstrip(" .,")


def run_checks(checks: Any, names: list[str], results: Path) -> None:
    """Check one class after another; write a line when a class begins, and one for each result."""
    group = dp.get_process_group()
    with open(results, "a") as file, tempfile.TemporaryDirectory() as folder:

        def note(*entry: Any) -> None:
            if group.is_main:
                print(json.dumps(entry), file=file, flush=True)

        for name in names:
            note(name, "begun", None)
            done = "loss"
            try:
                with warnings.catch_warnings(), contextlib.redirect_stdout(None):
                    warnings.simplefilter("ignore")
                    for done, number in checks(name, Path(folder) / name):
                        note(name, done, number)
            except Exception as error:  # noqa: BLE001
                note(name, after(done, checks), f"{OURS}: {sentence(error)}")


def after(done: str, checks: Any) -> str:
    """Return the check that follows the last one that ended: the one that failed."""
    if checks is train_on_two_ranks:
        return "two ranks"
    order = ["initialized", "loss", "gradients", "weighted", "saved"]
    return order[min(order.index(done) + 1, len(order) - 1)]


# Functions of the main process.


def assign_parallel_plans(names: list[str]) -> dict[str, dict[str, Any]]:
    """Run all checks of these classes in other processes; return the results by class and check."""
    with tempfile.TemporaryDirectory(prefix="models-matrix-") as work:
        alone = [Path(work) / f"alone-{number}.jsonl" for number in range(NUM_WORKERS)]
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            workers = [Worker(names[number::NUM_WORKERS], file, "alone") for number, file in enumerate(alone)]
            list(pool.map(Worker.wait, workers))
        found = collect(alone)
        good = [name for name in names if is_good(found[name])]
        together = Path(work) / "together.jsonl"
        Worker(good, together, "together").wait()
        for name, results in collect([together]).items():
            found[name].update(results)
        return found


class Worker:
    """Runs a process, or a job of two ranks, that checks classes, and restarts it after a class that ended it."""

    def __init__(self, names: list[str], results: Path, kind: str) -> None:
        self._left, self._results, self._kind = list(names), results, kind
        results.touch()
        self._process = self._start()

    def _start(self) -> Any:
        listed = self._results.with_suffix(".names")
        listed.write_text(json.dumps(self._left))
        ranks = ["-m", "mindnlp_dp", "run", "--nproc", "2", "--log-dir", str(self._results) + ".logs"]
        command = [*(ranks if self._kind == "together" else []), __file__, "--worker", self._kind]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "GLOG_v": "3", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *command, "--names", str(listed), "--results", str(self._results)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def wait(self) -> None:
        while self._left:
            seen = -1
            while self._process.poll() is None and self._has_grown(seen):
                seen = self._results.stat().st_size
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(SECONDS_A_CLASS)
            if self._process.poll() is None:
                self._process.terminate()
            if self._process.wait() == 0:
                return
            begun = [json.loads(line)[0] for line in self._results.read_text().splitlines()]
            # The class that was being checked has ended the process.
            culprit = begun[-1] if begun and begun[-1] in self._left else self._left[0]
            what = "two ranks" if self._kind == "together" else "loss"
            with open(self._results, "a") as file:
                how = f"the process ended with exit code {self._process.returncode}"
                print(json.dumps([culprit, what, f"{OURS if what == 'two ranks' else UPSTREAM}: {how}"]), file=file)
            self._left = self._left[self._left.index(culprit) + 1 :]
            if self._left:
                self._process = self._start()

    def _has_grown(self, seen: int) -> bool:
        return self._results.stat().st_size > seen


def collect(files: list[Path]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            name, what, value = json.loads(line)
            found.setdefault(name, {})
            if what != "begun":
                found[name][what] = value
    return found


def is_good(results: dict[str, Any]) -> bool:
    return bool(results) and not any(isinstance(value, str) for value in results.values())


def problems(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each failure that is not upstream's."""
    wrong = []
    for name, results in found.items():
        fails_upstream = any(str(value).startswith(UPSTREAM) for value in results.values())
        for what, value in results.items():
            if isinstance(value, str):
                wrong += [f"{name}: {what}: {value}"] if value.startswith(OURS) else []
            elif not value <= LIMITS[what] and not fails_upstream:
                wrong.append(f"{name}: {what}: {value:.2g}, the limit is {LIMITS[what]:g}")
        if is_good(results) and set(results) != set(LIMITS):
            wrong.append(f"{name}: not all checks were run: {', '.join(results)}")
    return wrong


def table(found: dict[str, dict[str, Any]], families: dict[str, list[str]]) -> list[str]:
    """Make a row for each family's good classes, with their largest numbers, and one for each class that fails."""
    lines = [f"| family | classes | {' | '.join(HEADINGS.values())} |", f"|---|---|{'---|' * len(HEADINGS)}"]
    for family, names in sorted(families.items()):
        good = [name for name in names if is_good(found[name])]
        if good:
            worst = {what: max(found[name][what] for name in good) for what in HEADINGS}
            cells = [f"{worst[what]:.1e}" if worst[what] else "0" for what in HEADINGS]
            lines.append(f"| {family} | {len(good)} | {' | '.join(cells)} |")
        for name in sorted(set(names) - set(good)):
            cells = [cell(found[name].get(what)) for what in HEADINGS]
            lines.append(f"| {family} | `{name}` | {' | '.join(cells)} |")
    return lines


def cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.1e}" if value else "0"


def verdicts(lines: list[str]) -> set[tuple[str, str, bool]]:
    """Return a table's content without numbers: for each family and class, whether it fails upstream."""
    rows = [[part.strip() for part in line.strip("|\n ").split("|")] for line in lines if line.startswith("| ")]
    return {(row[0], row[1], any(part.startswith(UPSTREAM) for part in row)) for row in rows[1:]}


def section() -> tuple[str, str]:
    """Return the lines before and after the table of the installed MindNLP."""
    series = mindnlp_series()
    return f"<!-- MindNLP {series}: written by tests/models_matrix.py -->", f"<!-- end of MindNLP {series} -->"


def written_table() -> list[str]:
    begin, end = section()
    return TABLE.read_text().split(begin)[1].split(end)[0].strip().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", action="store_true", help=f"the families {', '.join(CORE)}")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these families")
    parser.add_argument("--write", action="store_true", help="write the table of docs/models.md")
    parser.add_argument("--worker", choices=("alone", "together"), help=argparse.SUPPRESS)
    parser.add_argument("--names", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        dp.init_process_group()
        run_checks(
            check if args.worker == "alone" else train_on_two_ranks, json.loads(args.names.read_text()), args.results
        )
        return 0

    from small_models import model_classes

    wanted = args.only or (CORE if args.core else None)
    families: dict[str, list[str]] = {}
    for each in model_classes():
        if wanted is None or each.family in wanted:
            families.setdefault(each.family, []).append(each.name)
    if not families:
        parser.error(f"no family among {', '.join(wanted or ())}")
    found = assign_parallel_plans([name for names in families.values() for name in names])
    lines = table(found, families)
    print("\n".join(lines))
    wrong = problems(found)
    if args.write:
        begin, end = section()
        head, rest = TABLE.read_text().split(begin)
        TABLE.write_text(f"{head}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.split(end)[1]}")
    elif not args.core and not args.only:
        for family, name, fails in sorted(verdicts(lines) ^ verdicts(written_table())):
            wrong.append(f"docs/models.md, {family}, {name}: {'fails' if fails else 'works'} in one of the two only")
    num_good = sum(map(is_good, found.values()))
    print("\n".join(wrong))
    print(f"{num_good} classes of {len(families)} families, {len(found) - num_good} fail upstream")
    print(f"{len(found) - len(wrong)} passed, {len(wrong)} failed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
