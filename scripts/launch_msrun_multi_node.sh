#!/usr/bin/env bash
# Launch a script with MindSpore's msrun on several hosts. Run this on each host, within two minutes.
#
#   MASTER_ADDR=10.0.0.1 NNODES=2 NODE_RANK=0 DEVICE=Ascend bash scripts/launch_msrun_multi_node.sh SCRIPT ARGS...
#   MASTER_ADDR=10.0.0.1 NNODES=2 NODE_RANK=1 DEVICE=Ascend bash scripts/launch_msrun_multi_node.sh SCRIPT ARGS...
#
#   MASTER_ADDR       address of the host with NODE_RANK 0, reachable from all hosts
#   NNODES            number of hosts
#   NODE_RANK         number of this host: 0 to NNODES - 1
#   LOCAL_WORKER_NUM  processes on each host, one per device        (default 2)
#   DEVICE            Ascend, GPU or CPU                            (default Ascend)
#   MASTER_PORT       TCP port of MASTER_ADDR                       (default 8118, msrun's own)
#   LOG_DIR           folder of worker_R.log and scheduler.log      (default logs/msrun-node-NODE_RANK)
#
# MS_NODE_TIMEOUT is a variable of MindSpore (default 30 seconds): how long ranks on CPU wait for a late rank, and how
# long msrun takes to end a job after a rank has failed.
#
# All hosts need the same script, data and environment. Tested between two network namespaces of one machine,
# on CPU (tests/two_hosts.sh); not tested on Ascend or GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/msrun_checks.sh"

for name in MASTER_ADDR NNODES NODE_RANK; do
  [ -n "${!name:-}" ] || fail "$name is not set; see the head of scripts/launch_msrun_multi_node.sh"
done
LOCAL_WORKER_NUM=${LOCAL_WORKER_NUM:-2}
DEVICE=${DEVICE:-Ascend}
MASTER_PORT=${MASTER_PORT:-8118}
LOG_DIR=${LOG_DIR:-$ROOT/logs/msrun-node-$NODE_RANK}

check_device
check_count NNODES
check_count NODE_RANK 0
check_count LOCAL_WORKER_NUM
[ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK must be from 0 to $((NNODES - 1)), got $NODE_RANK"
check_workers "$LOCAL_WORKER_NUM"
[ $# -gt 0 ] || fail "which script? bash scripts/launch_msrun_multi_node.sh SCRIPT ARGS..."
check_script "$1"
if [ "$NODE_RANK" -eq 0 ]; then
  check_port
fi
prepare_environment

exec msrun --worker_num=$((NNODES * LOCAL_WORKER_NUM)) --local_worker_num="$LOCAL_WORKER_NUM" \
  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --node_rank="$NODE_RANK" \
  --log_dir="$LOG_DIR" --join=True --cluster_time_out=120 "$@"
