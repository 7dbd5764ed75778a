#!/usr/bin/env bash
# Run real Slurm on one machine: a controller and two nodes, each with its own network namespace and host name. They run
# the quickstart's first updates with each script of scripts/slurm/, and a job that is requeued and resumed.
#
#   bash tests/slurm.sh [CONFIG]       default: configs/quickstart_short_cpu.yaml
#
# Needs root, iproute2, and Debian's packages: apt-get install --no-install-recommends slurmctld slurmd slurm-client
# slurm-wlm-basic-plugins munge libpmix2 libpmix-dev. Passes if all three ways report world_size 2, replicas in sync and
# equal digests, and the job that was requeued ends with the weights of one that was not.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config=${1:-$ROOT/configs/quickstart_short_cpu.yaml}
config=$(cd "$(dirname "$config")" && pwd)/$(basename "$config")
for program in slurmctld slurmd srun munged; do
  if ! command -v "$program" >/dev/null; then
    echo "skipped: there is no $program here; apt-get install --no-install-recommends slurmctld slurmd slurm-client" \
      "slurm-wlm-basic-plugins munge libpmix2 libpmix-dev"
    exit 0
  fi
done
source "$ROOT/scripts/environment.sh"
ensure_environment mpi,quickstart,report,homework,docs,dev
source "$ROOT/tests/two_namespaces.sh"
open_two_hosts || exit 0
trap 'stop_slurm; close_two_hosts' EXIT

stop_slurm() {
  for file in "$work"/slurm/*.pid; do
    [ -f "$file" ] && kill "$(cat "$file")" 2>/dev/null || true
  done
}

start_slurm() {
  local slurm=$work/slurm node
  chmod 755 "$work"
  mkdir -p "$slurm/state" "$slurm/spool-node1" "$slurm/spool-node2" "$slurm/tmp-node1" "$slurm/tmp-node2" "$slurm/munge"
  chmod 711 "$slurm/munge"
  head -c 1024 /dev/urandom >"$slurm/munge.key"
  chmod 400 "$slurm/munge.key"
  munged --force --key-file="$slurm/munge.key" --socket="$slurm/munge/socket" --pid-file="$slurm/munged.pid" \
    --log-file="$slurm/munged.log" --seed-file="$slurm/munge.seed"
  cat >"$slurm/slurm.conf" <<CONF
ClusterName=two
SlurmctldHost=$first($network.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$slurm/munge/socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation=$slurm/state
SlurmdSpoolDir=$slurm/spool-%n
TmpFS=$slurm/tmp-%n
SlurmctldPidFile=$slurm/slurmctld.pid
SlurmdPidFile=$slurm/slurmd-%n.pid
SlurmctldLogFile=$slurm/slurmctld.log
SlurmdLogFile=$slurm/slurmd-%n.log
SlurmctldPort=6917
ReturnToService=2
KillWait=5
NodeName=node1 NodeHostname=$first NodeAddr=$network.1 Port=6918 CPUs=4
NodeName=node2 NodeHostname=$second NodeAddr=$network.2 Port=6918 CPUs=4
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
CONF
  echo "CgroupPlugin=cgroup/v1" >"$slurm/cgroup.conf"
  export SLURM_CONF=$slurm/slurm.conf
  on_node node1 slurmctld -f "$SLURM_CONF" >"$slurm/slurmctld.out" 2>&1 || { cat "$slurm/slurmctld.out"; exit 1; }
  for node in node1 node2; do
    on_node "$node" slurmd -N "$node" -f "$SLURM_CONF" >"$slurm/$node.out" 2>&1 || { cat "$slurm/$node.out"; exit 1; }
  done
  for _ in $(seq 60); do
    if [ "$(on_node node1 timeout 5 sinfo -h -N -t idle 2>/dev/null | wc -l)" = 2 ]; then
      return
    fi
    sleep 0.2
  done
  echo "the two nodes never came up:"
  tail -n 20 "$slurm"/*.log "$slurm"/*.out
  exit 1
}

# on_node NODE COMMAND...: run a command on the host of that node, on all cores.
on_node() {
  local host=$first
  [ "$1" = node1 ] || host=$second
  shift
  ip netns exec "$host" unshare --uts bash -c 'hostname "$0"; exec "$@"' "$host" "$@"
}

report() {
  python - "$1/report.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
assert report["world_size"] == 2 and report["replicas_in_sync"] is True, report
print(report["backend"], report["replica_digest"], sep="\t")
PYTHON
}

# batch NAME WAY FLAGS...: submit the quickstart's first updates, and print the job's number.
batch() {
  local name=$1 way=$2
  shift 2
  on_node node1 timeout 20 sbatch --parsable --chdir "$ROOT" --output "$work/$name.out" "scripts/slurm/$way.sbatch" \
    "$ROOT/scripts/finetune.py" --config "$config" --max-steps 20 --output-dir "$work/$name" "$@"
}

state_of() { on_node node1 timeout 20 scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p'; }

# end_of NAME JOB: wait for the job, and print its report.
end_of() {
  local state=
  for _ in $(seq 600); do
    state=$(state_of "$2")
    case $state in COMPLETED | FAILED | CANCELLED | NODE_FAIL | TIMEOUT) break ;; esac
    sleep 0.5
  done
  if [ "$state" != COMPLETED ] || ! report "$work/$1"; then
    echo "$1 ended as $state:"
    tail -n 30 "$work/$1.out"
    exit 1
  fi
}

start_slurm
cd "$ROOT"
for way in srun mpirun mindspore; do
  end_of "$way" "$(batch "$way" "$way")" | tee "$work/$way.line"
  [ "$(cut -f 2 "$work/srun.line")" = "$(cut -f 2 "$work/$way.line")" ] || { echo "the digests differ"; exit 1; }
done
echo "equal digests: two nodes of Slurm trained one model, whatever started the ranks"

# Slurm sends this signal a minute before a job's time runs out; here it comes in the middle of the updates.
saving=(--save-steps 5)
number=$(batch requeued srun "${saving[@]}")
# On a busy machine the ranks take a minute to start.
for _ in $(seq 3000); do
  [ -d "$work/requeued/checkpoint-5" ] && break
  sleep 0.1
done
on_node node1 timeout 20 scancel --batch --signal=USR1 "$number"
for _ in $(seq 1200); do
  [ "$(state_of "$number")" = PENDING ] && break
  sleep 0.1
done
# Slurm waits two minutes before it starts a job again.
on_node node1 timeout 20 scontrol update "JobId=$number" StartTime=now
end_of requeued "$number" | tee "$work/requeued.line"
grep -q "it is requeued" "$work/requeued.out" || { echo "the job was not requeued"; exit 1; }
grep -q "restarted: resuming from" "$work/requeued.out" || { echo "the job was not resumed"; exit 1; }
[ "$(cut -f 2 "$work/srun.line")" = "$(cut -f 2 "$work/requeued.line")" ] || { echo "the digests differ"; exit 1; }
echo "the same digest: a job that was requeued ended as one that was not"
