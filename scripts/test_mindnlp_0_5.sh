#!/usr/bin/env bash
# Run the Trainer's tests on MindNLP 0.5.1 with two ranks under MPI, and some of them with other numbers of ranks and
# under MindSpore's own transport. Creates or reuses .venv-mindnlp-0.5 (2 GB, without PyTorch).
#
#   bash scripts/test_mindnlp_0_5.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MINDNLP=0.5
source scripts/environment.sh
ensure_environment mpi,quickstart,dev
# Variables that an outer job left in this shell would change the jobs that the tests start.
unset MINDNLP_DP_KERNELS MULTI_NPU MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT OMP_NUM_THREADS
export DEVICE_TARGET=CPU

# parallel LAUNCHER RANKS [NAME...]: runs the Trainer's files of the parallel suite, or the named ones.
parallel() {
  local names=(trainer equivalence decisions orders resuming batch_scaling evaluation bad_losses models zero transformers_trainer
    token_losses)
  if [ $# -gt 2 ]; then
    names=("${@:3}")
  fi
  local files=("${names[@]/#/tests/parallel/test_}")
  python tests/run_parallel.py --launcher "$1" --world-size "$2" "${files[@]/%/.py}"
}

parallel mpi 2
# One rank, and a number of ranks that is not a power of two.
parallel mpi 1 equivalence
parallel mpi 3 evaluation orders
parallel mindspore 2 equivalence trainer orders
python tests/models_matrix.py --core
python -m pytest tests/single/test_mindtorch_kernels.py tests/single/test_optim.py
# A job that loses ranks and continues in place.
python -m pytest tests/failure/test_in_place.py -k "no_update_is_made_twice or become_smaller"
