# Sourced by the msrun scripts: reports in one sentence mistakes after which msrun would hang or print a stack trace.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "error: $*" >&2
  exit 2
}

check_device() {
  case $DEVICE in Ascend | GPU | CPU) ;; *) fail "DEVICE must be Ascend, GPU or CPU, got '$DEVICE'" ;; esac
}

# check_count NAME [LEAST]: checks that the variable NAME holds a number of at least LEAST (default 1).
check_count() {
  local value=${!1} least=${2:-1}
  case $value in '' | *[!0-9]*) fail "$1 must be at least $least, got '$value'" ;; esac
  [ "$value" -ge "$least" ] || fail "$1 must be at least $least, got '$value'"
}

# check_workers NUMBER: checks that this host has at least NUMBER devices, one for each worker.
check_workers() {
  local visible cards count meant
  case $DEVICE in
    CPU) return ;;
    Ascend) visible=${ASCEND_RT_VISIBLE_DEVICES-unset} cards=(/dev/davinci[0-9]*) ;;
    GPU) visible=${CUDA_VISIBLE_DEVICES-unset} cards=(/dev/nvidia[0-9]*) ;;
  esac
  if [ "$visible" != unset ]; then
    if [ "$DEVICE" = Ascend ]; then
      # CANN stops reading at a character that is neither a digit nor a comma, and takes ascending ids only.
      # -1 hides all cards.
      [ "$visible" != -1 ] || visible=
      meant=$({ grep -oE '[0-9]+' || true; } <<<"$visible" | sort -nu | paste -sd ,)
      [ "$visible" = "$meant" ] || fail "ASCEND_RT_VISIBLE_DEVICES='$visible' is not a list for CANN, which takes" \
        "ascending ids and commas, without spaces; write, for example, ASCEND_RT_VISIBLE_DEVICES=$meant"
    fi
    IFS=, read -ra cards <<<"$visible"
    count=${#cards[@]}
  elif [ -e "${cards[0]}" ]; then
    count=${#cards[@]}
  else
    # No file matches the pattern, so cards holds the pattern itself.
    count=0
  fi
  [ "$1" -le "$count" ] || fail "$1 workers, but this host has $count $DEVICE devices to use;" \
    "start at most that many, or try DEVICE=CPU"
}

# check_cores NUMBER: checks that this host has at least NUMBER cores, one for each process.
check_cores() {
  local cores
  cores=$(nproc)
  [ "$1" -le "$cores" ] || fail "$1 processes, but there are $cores cores to use; they would take turns"
}

# output_dir_in CONFIG: prints its output_dir, without quotes and a comment.
output_dir_in() {
  sed -n -e 's/^output_dir: *//' -e 't found' -e 'b' -e ':found' -e 's/ #.*//' -e "s/^[\"']//" -e "s/[\"' ]*$//p" "$1"
}

# output_dir CONFIG FLAGS...: prints the output folder of a job with these flags, which may name another config. With an
# empty name the job would write files into the root folder, and a script would remove files there.
output_dir() {
  local config=$1 default folder given=false
  default=$(output_dir_in "$config")
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      --output-dir=*) folder=${1#*=} given=true ;;
      --output-dir) folder=${2-} given=true ;;
      --config=*) config=${1#*=} ;;
      --config) config=${2-} ;;
    esac
    shift
  done
  $given || folder=$(output_dir_in "$config" 2>/dev/null || true)
  $given || folder=${folder:-$default}
  case $folder in '' | -*) fail "--output-dir must name a folder, got '$folder'" ;; esac
  echo "$folder"
}

# tell_errors CODE: prints the errors of all workers; msrun shows only rank 0's log, but any rank may have failed.
tell_errors() {
  echo "msrun ended with $1; all logs: $LOG_DIR" >&2
  grep -hs "^error: " "$LOG_DIR"/worker_*.log | sort -u >&2 || true
}

check_script() {
  [ -f "$1" ] || fail "the script $1 does not exist"
}

# No other process may listen on the port of the rendezvous: msrun would hang, or join another job.
check_port() {
  check_count MASTER_PORT
  if (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; then
    fail "port $MASTER_PORT is in use; set MASTER_PORT to another one, such as $((MASTER_PORT + 100))"
  fi
}

# Finds msrun, unsets variables that an earlier job left in the shell, and exports the device.
prepare_environment() {
  if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$ROOT/.venv/bin/msrun" ]; then
    PATH=$ROOT/.venv/bin:$PATH
  fi
  command -v msrun >/dev/null || fail "msrun was not found; pip install mindspore, or activate its environment"
  unset MS_ROLE MS_NODE_ID MS_SCHED_HOST MS_SCHED_PORT MS_WORKER_NUM MS_WORKER_IP RANK_ID RANK_SIZE DEVICE_ID \
    RANK_TABLE_FILE MINDSPORE_HCCL_CONFIG_PATH
  export DEVICE_TARGET=$DEVICE GLOG_v=${GLOG_v:-3} PYTHONUNBUFFERED=1
  mkdir -p "$LOG_DIR"
}
