"""Print the table of bench_two_hosts.sh from the measurements of train_bert.py."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from common import machine, write_json

# A gigabit Ethernet frame carries 1,448 bytes of payload in 1,538.
PAYLOAD_SHARE = 1448 / 1538


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--rate", default="1gbit", help="of the wire, as tc writes it: 1gbit, 100mbit")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    job = json.loads(args.measured.read_text())
    measured, gradient_bytes = job["measured"], job["gradient_bytes"]
    bits = float(args.rate.rstrip("mgbit")) * (1e9 if "g" in args.rate else 1e6)
    # With N = 2 hosts each sends 2(N-1)/N = 1 times the gradients.
    wire = 8 * gradient_bytes / bits
    compute = measured["compute"]["step"]
    limits = [max(seconds, wire) for seconds in compute]
    print(
        f"{machine()}; two hosts with a core each, {args.rate} between them; BERT, {gradient_bytes / 4e6:.1f} million"
    )
    print(f"parameters, {len(compute)} steps of every kind, in turns; medians")
    print(
        f"all gradients take {wire:.3f} s on that wire at its full rate, {wire / PAYLOAD_SHARE:.3f} s with headers; "
        f"a step without exchange {statistics.median(compute):.3f} s"
    )
    print(f"{'':26}{'step':>9}{'exposed':>10}{'x limit':>10}{'MB sent':>10}{'x gradients':>13}")
    table = {}
    for name, numbers in measured.items():
        over = [step / limit for step, limit in zip(numbers["step"], limits)]
        row = {
            "step_seconds": statistics.median(numbers["step"]),
            "exposed_seconds": statistics.median(numbers["exposed"]),
            "over_limit": statistics.median(over),
            "over_limit_runs": over,
            "payload_over_gradients": statistics.median(numbers["sent"]) / gradient_bytes,
        }
        table[name] = row
        print(
            f"{name:26}{row['step_seconds']:8.3f}s{row['exposed_seconds']:9.3f}s{row['over_limit']:10.2f}"
            f"{row['payload_over_gradients'] * gradient_bytes / 1e6:10.1f}{row['payload_over_gradients']:13.3f}"
        )
    ratios = {
        ratio: table[name][of]
        for ratio, name, of in [
            ("step_over_limit", "overlap", "over_limit"),
            ("step_over_limit_all_bytes", "overlap, all bytes", "over_limit"),
            ("step_over_limit_without_overlap", "after", "over_limit"),
            ("payload_over_gradients", "after", "payload_over_gradients"),
            ("payload_over_gradients_fp16", "after, fp16, all bytes", "payload_over_gradients"),
        ]
        if name in table
    }
    for name in ("overlap, fp16", "overlap, bf16", "PowerSGD, rank 4"):
        pairs = zip(measured["overlap"]["step"], measured[name]["step"])
        ratios[f"default_over_{name}"] = statistics.median(default / compressed for default, compressed in pairs)
        print(f"{name}: {ratios[f'default_over_{name}']:.2f} times as fast as the default")
    numbers = {"machine": machine(), "wire_seconds": wire, "runs": measured, "table": table, "ratios": ratios}
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
