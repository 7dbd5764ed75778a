# Sourced by the batch scripts beside it, within a Slurm job: sets up the environment and requeues the job in time.
#
# run_to_the_end COMMAND...: runs the command, waits for it, and requeues the job when Slurm signals that its time limit
# is near. Slurm sets SLURM_RESTART_COUNT in the requeued job, so dp.DataParallelTrainer resumes from the newest
# checkpoint that the same job has written; ranks that Slurm or mpirun start write none when the time is near.
# With saves_on_sigterm=1, the command's processes, which are launchers, first get SIGTERM, write one, and end.

ROOT=${SLURM_SUBMIT_DIR:?this is a script for sbatch}
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$ROOT/.venv/bin/python" ]; then
  PATH=$ROOT/.venv/bin:$PATH
fi
if [ $# -eq 0 ] || [ ! -f "$1" ]; then
  echo "error: which script? sbatch scripts/slurm/NAME.sbatch SCRIPT ARGS..., from the folder that has scripts/" >&2
  exit 2
fi
export PYTHONUNBUFFERED=1 GLOG_v=${GLOG_v:-3}
export MINDNLP_DP_RESTART_COUNT=${SLURM_RESTART_COUNT:-0} MINDNLP_DP_JOB=slurm-$SLURM_JOB_ID

requeue() {
  echo "the time of this job is running out: it is requeued" >&2
  scontrol requeue "$SLURM_JOB_ID"
}

time_is_near() {
  is_near=1
  if [ -z "${saves_on_sigterm:-}" ]; then
    requeue
  else
    echo "the time of this job is running out: it is asked to save" >&2
    # Without --batch or --full, scancel signals the processes that srun has started, not this script. A SIGTERM to srun
    # itself would kill them.
    scancel --signal=TERM "$SLURM_JOB_ID"
  fi
}

run_to_the_end() {
  local code=0 is_near=
  trap time_is_near USR1
  "$@" &
  # A signal interrupts wait but does not end the command: wait again.
  while true; do
    wait $! && code=0 || code=$?
    [ $code -gt 128 ] && kill -0 $! 2>/dev/null || break
  done
  # A job that has reached its end meanwhile is not requeued.
  [ -z "$is_near" ] || [ -z "${saves_on_sigterm:-}" ] || [ $code -eq 0 ] || requeue
  return $code
}
