#!/usr/bin/env bash
# Compare the accuracy of the quickstart with and without gradient compression: uncompressed, fp16, bf16 and PowerSGD.
# It trains on two hosts, which are network namespaces of this machine with one core each.
#
#   bash benchmarks/bench_compression.sh [--config configs/quickstart_cpu.yaml] [--json FILE]     needs root and iproute2
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config=$ROOT/configs/quickstart_cpu.yaml json=
while [ $# -gt 0 ]; do
  case $1 in
    --config) config=$2 ;;
    --json) json=$2 ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
  shift 2
done
source "$ROOT/scripts/environment.sh"
ensure_environment mpi,quickstart
source "$ROOT/tests/two_namespaces.sh"
open_two_hosts || exit 0

train() {
  local name=$1
  shift
  on_both "$ROOT/scripts/finetune.py" --config "$config" --output-dir "$work/$name" --stats "$@" >"$work/$name.out" 2>&1 ||
    { tail -n 30 "$work/$name.out"; exit 1; }
}
train none
train fp16 --compression fp16
train bf16 --compression bf16
train powersgd-4 --compression powersgd --powersgd-rank 4
python "$ROOT/benchmarks/compression_table.py" "$work" none fp16 bf16 powersgd-4 ${json:+--json "$json"}
