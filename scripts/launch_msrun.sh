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
# Without a script it runs the quickstart. The environment is the active one, or .venv if there is one.
# Run here on CPU only; Ascend and GPU are MindSpore's documented way, not tried by us.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

WORKER_NUM=${WORKER_NUM:-2}
DEVICE=${DEVICE:-Ascend}
MASTER_PORT=${MASTER_PORT:-8118}
LOG_DIR=${LOG_DIR:-$ROOT/logs/msrun}

case $WORKER_NUM in '' | *[!0-9]* | 0) echo "error: WORKER_NUM must be at least 1, got '$WORKER_NUM'" >&2; exit 2 ;; esac
case $DEVICE in Ascend | GPU | CPU) ;; *) echo "error: DEVICE must be Ascend, GPU or CPU, got '$DEVICE'" >&2; exit 2 ;; esac
if [ $# -eq 0 ]; then
  set -- "$ROOT/scripts/finetune.py" --config "$ROOT/configs/quickstart_cpu.yaml" --output-dir "$ROOT/outputs/quickstart"
fi
[ -f "$1" ] || { echo "error: the script $1 does not exist" >&2; exit 2; }
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$ROOT/.venv/bin/msrun" ]; then
  PATH=$ROOT/.venv/bin:$PATH
fi
command -v msrun >/dev/null || { echo "error: msrun was not found; pip install mindspore, or activate its environment" >&2; exit 2; }

# What an earlier job left in the shell would bind this one to the wrong port or role.
unset MS_ROLE MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT MS_WORKER_NUM RANK_TABLE_FILE
export DEVICE_TARGET=$DEVICE GLOG_v=${GLOG_v:-3} PYTHONUNBUFFERED=1
mkdir -p "$LOG_DIR"

exec msrun --worker_num="$WORKER_NUM" --local_worker_num="$WORKER_NUM" --master_port="$MASTER_PORT" \
  --log_dir="$LOG_DIR" --join=True --cluster_time_out=120 --tail_worker_log=0 "$@"
