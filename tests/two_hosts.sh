#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces, joined by a wire, train the quickstart together, once under
# msrun and once under mpirun, with the launch scripts as a user would call them.
#
#   bash tests/two_hosts.sh [CONFIG]       default: configs/quickstart_short_cpu.yaml; needs root and iproute2
#
# Passes when both jobs report world_size 2 and replicas in sync, with equal digests.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config=${1:-$ROOT/configs/quickstart_short_cpu.yaml}

if [ "$(id -u)" -ne 0 ] || ! command -v ip >/dev/null; then
  echo "skipped: two network namespaces need root and iproute2 (apt-get install iproute2)"
  exit 0
fi
source "$ROOT/scripts/environment.sh"
ensure_environment mpi,quickstart,dev

# Names of this run's own, so that two runs do not meet.
tag=$$
first=dpA$tag second=dpB$tag
network=10.$((RANDOM % 200 + 20)).$((RANDOM % 250))
work=$(mktemp -d)

cleanup() {
  ip netns pids "$first" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns pids "$second" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns del "$first" 2>/dev/null || true
  ip netns del "$second" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

if ! ip netns add "$first" 2>"$work/no"; then
  echo "skipped: this machine grants no network namespaces ($(cat "$work/no"))"
  exit 0
fi
ip netns add "$second"
ip link add "vA$tag" netns "$first" type veth peer name "vB$tag" netns "$second"
for side in "$first vA$tag 1" "$second vB$tag 2"; do
  read -r name wire number <<<"$side"
  ip -n "$name" addr add "$network.$number/24" dev "$wire"
  ip -n "$name" link set "$wire" up
  ip -n "$name" link set lo up
done

# enter NAMESPACE COMMAND...: run a command on that host, under a host name and on a core of its own.
cores=($(python -c 'import os; c = sorted(os.sched_getaffinity(0)); print(c[0], c[-1])'))
enter() {
  local name=$1 core=${cores[0]}
  shift
  [ "$name" = "$first" ] || core=${cores[1]}
  ip netns exec "$name" unshare --uts taskset -c "$core" bash -c 'hostname "$0"; exec "$@"' "$name" "$@"
}

report() {
  python - "$1/report.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
assert report["world_size"] == 2 and report["replicas_in_sync"] is True, report
print(report["backend"], report["replica_digest"], f"{report['train_samples_per_second']:.0f} samples/s", sep="\t")
PYTHON
}

echo "msrun: $network.1 and $network.2, one process on each"
job=("$ROOT/scripts/finetune.py" --config "$config" --output-dir "$work/msrun")
for rank in 0 1; do
  host=$([ $rank -eq 0 ] && echo "$first" || echo "$second")
  enter "$host" env DEVICE=CPU MASTER_ADDR="$network.1" NNODES=2 NODE_RANK=$rank LOCAL_WORKER_NUM=1 \
    LOG_DIR="$work/log-$rank" bash "$ROOT/scripts/launch_msrun_multi_node.sh" "${job[@]}" >"$work/msrun-$rank.out" 2>&1 &
done
# msrun's exit codes are no verdict; the report is.
wait || true
report "$work/msrun" >"$work/msrun.line" || { tail -n 30 "$work"/msrun-*.out "$work"/log-*/*.log; exit 1; }
cat "$work/msrun.line"

echo "mpirun: the same"
cat >"$work/agent" <<AGENT
#!/usr/bin/env bash
# Called as ssh is: HOST COMMAND...
while [[ \$1 == -* ]]; do shift; done
shift
exec ip netns exec $second unshare --uts taskset -c ${cores[1]} bash -c 'hostname $second; exec bash -c "\$*"' agent "\$@"
AGENT
chmod +x "$work/agent"
job=("$ROOT/scripts/finetune.py" --config "$config" --output-dir "$work/mpirun")
enter "$first" env HOSTS="$network.1:1,$network.2:1" INTERFACE="$network.0/24" SSH_AGENT="$work/agent" \
  bash "$ROOT/scripts/launch_mpi_hosts.sh" "${job[@]}" >"$work/mpirun.out" 2>&1 || { tail -n 30 "$work/mpirun.out"; exit 1; }
report "$work/mpirun" >"$work/mpirun.line"
cat "$work/mpirun.line"

[ "$(cut -f 2 "$work/msrun.line")" = "$(cut -f 2 "$work/mpirun.line")" ] || { echo "the digests differ"; exit 1; }
echo "equal digests: the two hosts trained one model, under both launchers"
