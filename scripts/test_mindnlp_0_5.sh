#!/usr/bin/env bash
# The suites of the Trainer on MindNLP 0.5.1, with two ranks under MPI, and a few of them under MindSpore's own transport.
# Makes or reuses .venv-mindnlp-0.5 (2 GB, without PyTorch).
#
#   bash scripts/test_mindnlp_0_5.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MINDNLP=0.5
source scripts/environment.sh
ensure_environment mpi,quickstart,dev
export DEVICE_TARGET=CPU

results=$(mktemp)
trap 'rm -f "$results"' EXIT
# parallel LAUNCHER FILE...: some files of the parallel suite, with two ranks.
parallel() {
  python tests/run_parallel.py --launcher "$1" --world-size 2 "${@:2}"
  printf 'passed\t%d\tparallel, %s, 2\n' "$SECONDS" "$1" >>"$results"
}

files=()
for name in trainer equivalence decisions orders resuming evaluation bad_losses models zero transformers_trainer; do
  files+=("tests/parallel/test_$name.py")
done
parallel mpi "${files[@]}"
parallel mindspore tests/parallel/test_{equivalence,trainer,orders}.py
python -m pytest tests/single/test_mindtorch_kernels.py tests/single/test_optim.py
python tests/tried.py note trainer "$results"
