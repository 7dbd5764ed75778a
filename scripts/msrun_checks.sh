# Sourced by the msrun scripts: mistakes that msrun answers with a hang or a stack get one sentence here.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "error: $*" >&2
  exit 2
}

check_device() {
  case $DEVICE in Ascend | GPU | CPU) ;; *) fail "DEVICE must be Ascend, GPU or CPU, got '$DEVICE'" ;; esac
}

# check_count NAME [LEAST]: the variable NAME holds a number of at least LEAST (default 1).
check_count() {
  local value=${!1} least=${2:-1}
  case $value in '' | *[!0-9]*) fail "$1 must be at least $least, got '$value'" ;; esac
  [ "$value" -ge "$least" ] || fail "$1 must be at least $least, got '$value'"
}

# check_workers NUMBER: this host has a device for each of its workers.
check_workers() {
  local visible cards count
  case $DEVICE in
    CPU) return ;;
    Ascend) visible=${ASCEND_RT_VISIBLE_DEVICES-unset} cards=(/dev/davinci[0-9]*) ;;
    GPU) visible=${CUDA_VISIBLE_DEVICES-unset} cards=(/dev/nvidia[0-9]*) ;;
  esac
  if [ "$visible" != unset ]; then
    IFS=, read -ra cards <<<"$visible"
    count=${#cards[@]}
  elif [ -e "${cards[0]}" ]; then
    count=${#cards[@]}
  else
    # The pattern stands for itself: no file fits.
    count=0
  fi
  [ "$1" -le "$count" ] || fail "$1 workers, but this host has $count $DEVICE devices to use;" \
    "start at most that many, or try DEVICE=CPU"
}

# check_cores NUMBER: this host has a core for each of its processes.
check_cores() {
  local cores
  cores=$(nproc)
  [ "$1" -le "$cores" ] || fail "$1 processes, but there are $cores cores to use; they would take turns"
}

# output_dir CONFIG FLAGS...: where a job with these flags writes; flags win over the config. Without a name the job
# would write, and a script remove, files in the root folder.
output_dir() {
  local folder
  folder=$(sed -n 's/^output_dir: *//p' "$1")
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      --output-dir=*) folder=${1#*=} ;;
      --output-dir) folder=${2-} ;;
    esac
    shift
  done
  case $folder in '' | -*) fail "--output-dir must name a folder, got '$folder'" ;; esac
  echo "$folder"
}

# tell_errors CODE: what workers had to say; msrun shows rank 0's log only, and another rank may have ended the job.
tell_errors() {
  echo "msrun ended with $1; all logs: $LOG_DIR" >&2
  grep -hs "^error: " "$LOG_DIR"/worker_*.log | sort -u >&2 || true
}

check_script() {
  [ -f "$1" ] || fail "the script $1 does not exist"
}

# Nobody may listen where the processes are to meet: msrun would hang, or join a stranger's job.
check_port() {
  check_count MASTER_PORT
  if (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; then
    fail "port $MASTER_PORT is in use; set MASTER_PORT to another one, such as $((MASTER_PORT + 100))"
  fi
}

# Finds msrun, drops what an earlier job left in the shell, and passes the device on.
prepare_environment() {
  if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$ROOT/.venv/bin/msrun" ]; then
    PATH=$ROOT/.venv/bin:$PATH
  fi
  command -v msrun >/dev/null || fail "msrun was not found; pip install mindspore, or activate its environment"
  unset MS_ROLE MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT MS_WORKER_NUM MS_WORKER_IP RANK_ID RANK_SIZE RANK_TABLE_FILE DEVICE_ID
  export DEVICE_TARGET=$DEVICE GLOG_v=${GLOG_v:-3} PYTHONUNBUFFERED=1
  mkdir -p "$LOG_DIR"
}
