#!/usr/bin/env bash
# Run the homework in two CPU processes with msrun, then write the report page. Creates .venv if it does not exist.
#
#   bash scripts/homework_2cpu.sh --train-file train.csv --test-file test.csv [flags of homework/train_data_parallel.py]
#
# MASTER_PORT (default 8118) and LOG_DIR (default logs/homework_2cpu) may be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$(dirname "${BASH_SOURCE[0]}")/msrun_checks.sh"
config=$ROOT/configs/banking77_2cpu.yaml
out=$(output_dir "$config" "$@")
DEVICE=CPU
MASTER_PORT=${MASTER_PORT:-8118}
LOG_DIR=${LOG_DIR:-$ROOT/logs/homework_2cpu}
check_cores 2
check_port
ensure_environment report
prepare_environment
rm -f "$out/report.json"

# msrun may exit with 1 after a job that succeeded, so the report that the job wrote decides.
msrun --worker_num=2 --local_worker_num=2 --master_port="$MASTER_PORT" --log_dir="$LOG_DIR" --join=True \
  --cluster_time_out=120 --tail_worker_log=0 \
  "$ROOT/homework/train_data_parallel.py" --config "$config" "$@" --output-dir "$out" || tell_errors $?

mindnlp-dp report "$out"
