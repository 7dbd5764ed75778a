#!/usr/bin/env bash
# Run the Trainer's tests on MindNLP 0.5.1 with two ranks under MPI, and some of them with other numbers of ranks and
# under MindSpore's own transport. Creates or reuses .venv-mindnlp-0.5 (2 GB, without PyTorch).
#
#   bash scripts/test_mindnlp_0_5.sh         what must pass before a change lands
#   bash scripts/test_mindnlp_0_5.sh --all   before a release: every test of these files
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
  "") most="not slow" few="core and not slow" ;;
  --all) most="" few="" ;;
  *) echo "error: scripts/test_mindnlp_0_5.sh takes --all, or nothing; got '$1'" >&2; exit 2 ;;
esac
MINDNLP=0.5
source scripts/environment.sh
ensure_environment mpi,quickstart,dev
# Variables that an outer job left in this shell would change the jobs that the tests start.
unset MINDNLP_DP_KERNELS MULTI_NPU MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT OMP_NUM_THREADS
export DEVICE_TARGET=CPU

work=$(mktemp -d)
trap 'kill "$fork_server" || true; rm -rf "$work"' EXIT
source tests/fork_server.sh
start_fork_server "$work/ranks"

# parallel LAUNCHER RANKS MARKERS NAME...: runs the tests with these markers in the named files of the parallel suite.
parallel() {
  local files=("${@:4}")
  files=("${files[@]/#/tests/parallel/test_}")
  MINDNLP_DP_PYTHON=$work/ranks/python python tests/run_parallel.py --launcher "$1" --world-size "$2" "${files[@]/%/.py}" -m "$3"
}

parallel mpi 2 "$most" trainer trainer_again own_data equivalence orders batch_scaling evaluation bad_losses models transformers_trainer
parallel mpi 2 "$few" decisions resuming zero token_losses dropout batch_across_ranks labels
# One rank, and a number of ranks that is not a power of two.
[ "${1:-}" != --all ] || parallel mpi 1 "$most" equivalence
parallel mpi 3 "$most" evaluation orders
parallel mindspore 2 "$most" equivalence trainer orders
python tests/models_matrix.py --core
python -m pytest tests/single/test_mindtorch_kernels.py tests/single/test_optim.py tests/single/test_recompute.py \
  tests/single/test_pickled_weights.py
python -m pytest -m core tests/single/test_chats.py tests/single/test_after_training.py tests/single/test_tokenizers.py \
  tests/single/test_preferences.py
