#!/usr/bin/env bash
# Launch a script with MindSpore's msrun on one host: Ascend, GPU or CPU.
#
#   WORKER_NUM=2 DEVICE=CPU bash scripts/launch_msrun.sh [SCRIPT ARGS...]
#
#   WORKER_NUM   processes, one a device                       (default 2)
#   DEVICE       Ascend, GPU or CPU                            (default Ascend)
#   MASTER_PORT  TCP port on which the processes meet          (default 8118, msrun's own)
#   LOG_DIR      where worker_R.log and scheduler.log go       (default logs/msrun)
#
# MS_NODE_TIMEOUT is MindSpore's own (default 30): the seconds that a rank may be late for the others on CPU, and
# that msrun takes to end a job of which a rank has failed.
#
# Without a script it runs the quickstart. The environment is the active one, or .venv if there is one.
# Run here on CPU only; Ascend and GPU are MindSpore's documented way, not tried by us.
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
