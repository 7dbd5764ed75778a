#!/usr/bin/env bash
# Install everything and fine-tune a RoBERTa with two processes, on CPU, without a data download.
#
#   bash scripts/quickstart.sh [--nproc N] [--backend mpi|mindspore] [--engine mindnlp-0.4|mindnlp-0.5]
#                              [flags of scripts/finetune.py]
#
# Writes report.json, training.png and the model to outputs/quickstart (MindNLP 0.5: outputs/quickstart-mindnlp-0.5).
set -euo pipefail

nproc=2
backend=mpi
engine=mindnlp-${MINDNLP:-0.4}
config=""
flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --nproc | --backend | --engine | --config)
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
case $engine in
  mindnlp-0.4 | mindnlp-0.5) MINDNLP=${engine#mindnlp-} ;;
  *) echo "error: --engine must be mindnlp-0.4 or mindnlp-0.5, got '$engine'" >&2; exit 2 ;;
esac

[[ $nproc =~ ^[1-9][0-9]*$ ]] || { echo "error: --nproc must be a number of processes, got '$nproc'" >&2; exit 2; }
case $backend in
  mpi | mindspore) ;;
  *) echo "error: --backend must be mpi or mindspore, got '$backend'" >&2; exit 2 ;;
esac
[ -z "$config" ] || [ -f "$config" ] || { echo "error: --config $config: the file does not exist" >&2; exit 2; }

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
output_dir=$ROOT/outputs/quickstart
[ "$MINDNLP" = 0.4 ] || output_dir+=-$engine
# The flags are checked before the installation, for which the standard library is enough.
python=$VENV/bin/python
[ -x "$python" ] || python=$(_find_python)
PYTHONPATH=$ROOT "$python" -c '
import sys
from mindnlp_dp.finetuning.settings import flag_parser
from mindnlp_dp.text_classification.classification_config import FinetuneConfig
parser = flag_parser(FinetuneConfig, "Install everything and fine-tune a RoBERTa; --nproc, --backend and --engine are its own.")
parser.prog = "quickstart.sh"
parser.parse_args(sys.argv[1:])
' ${flags[@]+"${flags[@]}"}
case " ${flags[*]-} " in *" --help "* | *" -h "*) exit ;; esac
ensure_environment mpi,quickstart,report
log_dir=$ROOT/logs/quickstart-$(date +%Y%m%d-%H%M%S)-$$
export DEVICE_TARGET=CPU
exec mindnlp-dp run --nproc "$nproc" --backend "$backend" --log-dir "$log_dir" \
  "$ROOT/scripts/finetune.py" --config "${config:-$ROOT/configs/quickstart_cpu.yaml}" --output-dir "$output_dir" \
  ${flags[@]+"${flags[@]}"}
