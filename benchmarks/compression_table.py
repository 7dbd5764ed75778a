"""Print the table of bench_compression.sh from the reports of its runs and the statistics that they logged."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from common import machine, write_json

_SENT = re.compile(r"^update \d+: .*; ([0-9.]+) MB to other hosts$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    rows = {}
    for run in args.runs:
        report = json.loads((args.folder / run / "report.json").read_text())
        sent = [float(number) for number in _SENT.findall((args.folder / f"{run}.out").read_text())]
        rows[run] = {
            "accuracy": report["eval_accuracy"],
            "loss": report["eval_loss"],
            "megabytes_an_update": sum(sent) / len(sent),
            "samples_per_second": report["train_samples_per_second"],
            "replicas_in_sync": report["replicas_in_sync"],
        }
    print(f"{machine()}; the quickstart on two hosts with a core each, no limit on the wire")
    print(f"{'compression':14}{'accuracy':>10}{'loss':>10}{'MB per update':>14}{'samples/s':>11}  in sync")
    for run, row in rows.items():
        print(
            f"{run:14}{row['accuracy']:10.4f}{row['loss']:10.4f}{row['megabytes_an_update']:14.2f}"
            f"{row['samples_per_second']:11.0f}  {row['replicas_in_sync']}"
        )
    write_json(args.json, {"machine": machine(), "runs": rows})


if __name__ == "__main__":
    main()
