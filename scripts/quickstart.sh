#!/usr/bin/env bash
# From a bare machine to a RoBERTa fine-tuned by two processes, on CPU, without a data download.
#
#   bash scripts/quickstart.sh [--nproc N] [--backend mpi|mindspore] [flags of scripts/finetune.py]
#
# Leaves report.json, training.png and the model in outputs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

nproc=2
backend=mpi
config=$ROOT/configs/quickstart_cpu.yaml
flags=(--output-dir "$ROOT/outputs/quickstart")
while [ $# -gt 0 ]; do
  case $1 in
    --nproc | --backend | --config)
      [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    *)
      flags+=("$1")
      shift
      ;;
  esac
done

ensure_environment mpi,quickstart
log_dir=$ROOT/logs/quickstart-$(date +%Y%m%d-%H%M%S)-$$
export DEVICE_TARGET=CPU
exec mindnlp-dp run --nproc "$nproc" --backend "$backend" --log-dir "$log_dir" \
  "$ROOT/scripts/finetune.py" --config "$config" "${flags[@]}"
