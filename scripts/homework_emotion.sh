#!/usr/bin/env bash
# Run the course's BERT example in two processes with msrun, on Baidu's emotion data or on IMDB.
#
#   bash scripts/homework_emotion.sh [flags of homework/bert_emotion.py]
#   bash scripts/homework_emotion.sh --config configs/imdb_2npu.yaml
#
# DEVICE (default Ascend; GPU, CPU), WORKER_NUM (2), MASTER_PORT (8118) and LOG_DIR (logs/homework_emotion) may be set.
# python homework/download_emotion.py downloads the data. Tested on CPU only.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/msrun_checks.sh"
# Exits with an error if --output-dir has no value.
output_dir "$ROOT/configs/emotion_2npu.yaml" "$@" >/dev/null
DEVICE=${DEVICE:-Ascend}
WORKER_NUM=${WORKER_NUM:-2}
MASTER_PORT=${MASTER_PORT:-8118}
LOG_DIR=${LOG_DIR:-$ROOT/logs/homework_emotion}
check_device
check_count WORKER_NUM
check_workers "$WORKER_NUM"
check_port
prepare_environment

exec msrun --worker_num="$WORKER_NUM" --local_worker_num="$WORKER_NUM" --master_port="$MASTER_PORT" \
  --log_dir="$LOG_DIR" --join=True --cluster_time_out=120 --tail_worker_log=0 \
  "$ROOT/homework/bert_emotion.py" "$@"
