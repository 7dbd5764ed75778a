#!/usr/bin/env bash
# Time training steps of a BERT with 22.7 million parameters on two hosts with a link of 1 Gbit/s, with and without
# overlap, with and without compression. The hosts are network namespaces of this machine with one core each.
#
#   bash benchmarks/bench_two_hosts.sh [--steps 8] [--json FILE] [--rate 1gbit]        needs root and iproute2
#   bash benchmarks/bench_two_hosts.sh --rate 20mbit --compression yes      compares the default with compression only
#   bash benchmarks/bench_two_hosts.sh --zero3 yes [--rows 4]        compares zero_stage=3 with 2 only, rows of 128 tokens
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
rate=1gbit json= steps=8 compression=no zero3=no rows=4
while [ $# -gt 0 ]; do
  case $1 in
    --rate) rate=$2 ;;
    --json) json=$2 ;;
    --steps) steps=$2 ;;
    --compression) compression=$2 ;;
    --zero3) zero3=$2 ;;
    --rows) rows=$2 ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
  shift 2
done
source "$ROOT/scripts/environment.sh"
ensure_environment mpi
source "$ROOT/tests/two_namespaces.sh"
open_two_hosts || exit 0
limit_wire "$rate"

if [ "$zero3" = yes ]; then
  on_both "$ROOT/benchmarks/bench_memory.py" --job step_times --updates "$steps" --rows "$rows" --write "$work/steps.json" \
    >"$work/out" 2>&1 || { tail -n 30 "$work/out"; exit 1; }
  [ -z "$json" ] || cp "$work/steps.json" "$json"
  python - "$work/steps.json" "$rate" "$rows" <<'PYTHON'
import json, statistics, sys
medians = {stage: statistics.median(times) for stage, times in json.load(open(sys.argv[1])).items()}
print(f"two hosts, {sys.argv[2]}, {128 * int(sys.argv[3])} tokens a rank: zero_stage=2 {medians['2']:.2f} s an update, zero_stage=3 "
      f"{medians['3']:.2f} s, {medians['3'] / medians['2']:.2f} x")
PYTHON
  exit
fi

variants=(compute overlap "overlap, fp16" "overlap, bf16" "PowerSGD, rank 4")
[ "$compression" = yes ] || variants+=(after "after, zeros skipped" "after, fp16, all bytes" "overlap, all bytes")
on_both "$ROOT/benchmarks/train_bert.py" --variants "${variants[@]}" --steps "$steps" --write "$work/steps.json" \
  >"$work/out" 2>&1 || { tail -n 30 "$work/out"; exit 1; }
python "$ROOT/benchmarks/two_hosts_table.py" "$work/steps.json" --rate "$rate" ${json:+--json "$json"}
