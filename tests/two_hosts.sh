#!/usr/bin/env bash
# Train the quickstart's first updates on two hosts, simulated by two connected network namespaces of one machine, under
# msrun and under mpirun, with the launch scripts as a user calls them.
#
#   bash tests/two_hosts.sh [--all] [CONFIG]     default: configs/quickstart_short_cpu.yaml; needs root and iproute2
#
# With --all also an exchange after the backward pass, and a sharded update.
#
# Passes if all jobs report world_size 2 and replicas in sync, with equal digests; a job under mpirun that sends its
# gradients as float16 must send half the bytes (its digest differs).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
all=
[ "${1:-}" != --all ] || { all=1; shift; }
config=${1:-$ROOT/configs/quickstart_short_cpu.yaml}
# Enough updates to tell two models apart.
short=(--max-steps 20)
source "$ROOT/scripts/environment.sh"
ensure_environment mpi,quickstart,report,homework,docs,dev
source "$ROOT/tests/two_namespaces.sh"
open_two_hosts || exit 0

report() {
  python - "$1/report.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
assert report["world_size"] == 2 and report["replicas_in_sync"] is True, report
print(report["backend"], report["replica_digest"], f"{report['train_samples_per_second']:.0f} samples/s", sep="\t")
PYTHON
}

echo "msrun: $network.1 and $network.2, one process on each"
job=("$ROOT/scripts/finetune.py" --config "$config" "${short[@]}" --output-dir "$work/msrun")
for rank in 0 1; do
  host=$([ $rank -eq 0 ] && echo "$first" || echo "$second")
  enter "$host" env DEVICE=CPU MASTER_ADDR="$network.1" NNODES=2 NODE_RANK=$rank LOCAL_WORKER_NUM=1 \
    LOG_DIR="$work/log-$rank" bash "$ROOT/scripts/launch_msrun_multi_node.sh" "${job[@]}" >"$work/msrun-$rank.out" 2>&1 &
done
# msrun's exit codes are unreliable, so the report decides.
wait || true
report "$work/msrun" >"$work/msrun.line" || { tail -n 30 "$work"/msrun-*.out "$work"/log-*/*.log; exit 1; }
cat "$work/msrun.line"

# mpirun_job NAME FLAGS...: train under mpirun, and print the report's line and the megabytes sent.
mpirun_job() {
  local name=$1
  shift
  job=("$ROOT/scripts/finetune.py" --config "$config" "${short[@]}" --output-dir "$work/$name" --stats "$@")
  on_both "${job[@]}" >"$work/$name.out" 2>&1 || { tail -n 30 "$work/$name.out"; exit 1; }
  report "$work/$name" >"$work/$name.line"
  sent=$(sed -n 's/^update .*; \([0-9.]*\) MB to other hosts$/\1/p' "$work/$name.out" | awk '{s += $1} END {print s}')
  echo "$(cat "$work/$name.line")	$sent MB sent"
}

# same_model NAME FLAGS...: train under mpirun, and compare the digest with that of msrun.
same_model() {
  mpirun_job "$@"
  [ "$(cut -f 2 "$work/msrun.line")" = "$(cut -f 2 "$work/$1.line")" ] || { echo "the digests differ"; exit 1; }
}

echo "mpirun: the same, with gradients exchanged during the backward pass${all:+, after it, and with a sharded update}"
same_model overlap --overlap true
bytes=$sent
if [ -n "$all" ]; then
  same_model after --overlap false
  same_model zero --zero-stage 2
fi
echo "equal digests: the two hosts trained one model, under both launchers"

echo "mpirun: gradients rounded to float16 on the wire"
mpirun_job fp16 --overlap true --compression fp16
python -c "assert 0.45 < $sent / $bytes < 0.55, 'expected half of $bytes MB'"
