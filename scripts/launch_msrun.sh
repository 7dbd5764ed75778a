#!/usr/bin/env bash
# Launch a script with MindSpore's msrun on one host: Ascend, GPU or CPU.
#
#   WORKER_NUM=2 DEVICE=CPU bash scripts/launch_msrun.sh [SCRIPT ARGS...]
#
#   WORKER_NUM   processes, one per device                     (default 2)
#   DEVICE       Ascend, GPU or CPU                            (default Ascend)
#   MASTER_PORT  TCP port of the rendezvous                    (default 8118, msrun's own)
#   LOG_DIR      folder of worker_R.log and scheduler.log      (default logs/msrun)
#
# MS_NODE_TIMEOUT is a variable of MindSpore (default 30 seconds): how long ranks on CPU wait for a late rank, and how
# long msrun takes to end a job after a rank has failed.
#
# Without a script it runs the quickstart. It uses the active environment, or .venv if none is active.
# Tested on CPU only; Ascend and GPU follow MindSpore's documentation, untested.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/msrun_checks.sh"

WORKER_NUM=${WORKER_NUM:-2}
DEVICE=${DEVICE:-Ascend}
MASTER_PORT=${MASTER_PORT:-8118}
LOG_DIR=${LOG_DIR:-$ROOT/logs/msrun}

check_device
check_count WORKER_NUM
check_workers "$WORKER_NUM"
if [ $# -eq 0 ]; then
  set -- "$ROOT/scripts/finetune.py" --config "$ROOT/configs/quickstart_cpu.yaml" --output-dir "$ROOT/outputs/quickstart"
fi
check_script "$1"
check_port
prepare_environment

exec msrun --worker_num="$WORKER_NUM" --local_worker_num="$WORKER_NUM" --master_port="$MASTER_PORT" \
  --log_dir="$LOG_DIR" --join=True --cluster_time_out=120 --tail_worker_log=0 "$@"
