#!/usr/bin/env bash
# Run the homework on two Ascend NPUs with msrun, then write the report page.
#
#   bash scripts/homework_2npu.sh [flags of homework/train_data_parallel.py]
#
# MASTER_PORT (default 8118) and LOG_DIR (default logs/homework_2npu) may be set. Not tested: we have no NPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/msrun_checks.sh"
config=$ROOT/configs/banking77_2npu.yaml
out=$(output_dir "$config" "$@")
DEVICE=Ascend
MASTER_PORT=${MASTER_PORT:-8118}
LOG_DIR=${LOG_DIR:-$ROOT/logs/homework_2npu}
check_workers 2
check_port
prepare_environment
rm -f "$out/report.json"

# msrun may exit with 1 after a job that succeeded, so the report that the job wrote decides.
msrun --worker_num=2 --local_worker_num=2 --master_port="$MASTER_PORT" --log_dir="$LOG_DIR" --join=True \
  --cluster_time_out=120 --tail_worker_log=0 \
  "$ROOT/homework/train_data_parallel.py" --config "$config" "$@" --output-dir "$out" || tell_errors $?

mindnlp-dp report "$out"
