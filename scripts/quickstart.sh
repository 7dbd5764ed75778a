#!/usr/bin/env bash
# Install everything and fine-tune a RoBERTa with two processes, on CPU, without a data download.
#
#   bash scripts/quickstart.sh [--nproc N] [--backend mpi|mindspore] [--engine mindnlp-0.4|mindnlp-0.5]
#                              [flags of scripts/finetune.py]
#   bash scripts/quickstart.sh --compare [the same, without --nproc]
#
# Writes report.json, training.png and the model to outputs/quickstart (MindNLP 0.5: outputs/quickstart-mindnlp-0.5).
# --compare trains with one process, two ranks and four, shows that the losses and the weights are the same, and writes
# compare.json, compare.png and compare.svg to outputs/compare.
set -euo pipefail

compare=false
nproc=""
backend=mpi
engine=mindnlp-${MINDNLP:-0.4}
config=""
output_dir=""
flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --nproc=* | --backend=* | --engine=* | --config=* | --output-dir=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      ;;
    --compare)
      compare=true
      shift
      ;;
    --nproc | --backend | --engine | --config | --output-dir)
      [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
      name=${1#--}
      printf -v "${name/-/_}" %s "$2"
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

if $compare && [ -n "$nproc" ]; then
  echo "error: --compare runs 1, 2 and 4 processes, got --nproc $nproc; leave one of them out" >&2
  exit 2
fi
nproc=${nproc:-2}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || { echo "error: --nproc must be a number of processes, got '$nproc'" >&2; exit 2; }
case $backend in
  mpi | mindspore) ;;
  *) echo "error: --backend must be mpi or mindspore, got '$backend'" >&2; exit 2 ;;
esac
[ -z "$config" ] || [ -f "$config" ] || { echo "error: --config $config: the file does not exist" >&2; exit 2; }

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
task=quickstart
! $compare || task=compare
if [ -z "$output_dir" ]; then
  output_dir=$ROOT/outputs/$task
  [ "$MINDNLP" = 0.4 ] || output_dir+=-$engine
fi
# The flags are checked before the installation, for which the standard library is enough.
python=$VENV/bin/python
[ -x "$python" ] || python=$(_find_python)
PYTHONPATH=$ROOT "$python" -c '
import sys
from mindnlp_dp.finetuning.settings import flag_parser
from mindnlp_dp.text_classification.classification_config import FinetuneConfig
parser = flag_parser(FinetuneConfig, "Install everything and fine-tune a RoBERTa; --compare, --nproc, --backend and --engine are its own.")
parser.prog = "quickstart.sh"
parser.parse_args(sys.argv[1:])
' ${flags[@]+"${flags[@]}"}
case " ${flags[*]-} " in *" --help "* | *" -h "*) exit ;; esac
ensure_environment mpi,quickstart,report
log_dir=$ROOT/logs/$task-$(date +%Y%m%d-%H%M%S)-$$
export DEVICE_TARGET=CPU

# Sets the array job: the command that trains with $nproc processes.
set_job() { # LOG_DIR CONFIG OUTPUT_DIR
  job=(mindnlp-dp run --nproc "$nproc" --backend "$backend" --log-dir "$1" "$ROOT/scripts/finetune.py" --config "$2"
    ${flags[@]+"${flags[@]}"} --output-dir "$3")
}

if ! $compare; then
  set_job "$log_dir" "${config:-$ROOT/configs/quickstart_cpu.yaml}" "$output_dir"
  exec "${job[@]}"
fi
flags+=(--save-initial-model)
runs=()
for nproc in 1 2 4; do
  set_job "$log_dir-$nproc" "${config:-$ROOT/configs/quickstart_compare_cpu.yaml}" "$output_dir/$nproc"
  runs+=("$output_dir/$nproc")
  "${job[@]}"
done
exec python -m mindnlp_dp.finetuning.comparison "$output_dir" "${runs[@]}"
