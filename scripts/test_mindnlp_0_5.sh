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

files=()
for name in trainer equivalence decisions resuming evaluation bad_losses models transformers_trainer; do
  files+=("tests/parallel/test_$name.py")
done
python tests/run_parallel.py --launcher mpi --world-size 2 "${files[@]}"
python tests/run_parallel.py --launcher mindspore --world-size 2 tests/parallel/test_equivalence.py
