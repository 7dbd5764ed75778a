# Sourced by the batch scripts beside it, within a job of Slurm: the environment, and what a job does that is requeued.
#
# run_to_the_end COMMAND...: waits for it, and requeues the job when Slurm's signal says that its time is running out. It
# comes back with SLURM_RESTART_COUNT, by which dp.DataParallelTrainer knows that it goes on from the newest checkpoint
# that the job itself has written.

ROOT=${SLURM_SUBMIT_DIR:?this is a script for sbatch}
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$ROOT/.venv/bin/python" ]; then
  PATH=$ROOT/.venv/bin:$PATH
fi
if [ $# -eq 0 ] || [ ! -f "$1" ]; then
  echo "error: which script? sbatch scripts/slurm/NAME.sbatch SCRIPT ARGS..., from the folder that has scripts/" >&2
  exit 2
fi
export PYTHONUNBUFFERED=1 GLOG_v=${GLOG_v:-3} DEVICE_TARGET=${DEVICE_TARGET:-CPU}
export MINDNLP_DP_RESTART_COUNT=${SLURM_RESTART_COUNT:-0} MINDNLP_DP_JOB=slurm-$SLURM_JOB_ID

run_to_the_end() {
  local code=0
  trap 'echo "the time of this job is running out: it is requeued" >&2; scontrol requeue "$SLURM_JOB_ID"' USR1
  "$@" &
  # A signal ends wait, and not what is waited for.
  while true; do
    wait $! && code=0 || code=$?
    [ $code -gt 128 ] && kill -0 $! 2>/dev/null || break
  done
  return $code
}
