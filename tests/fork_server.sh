# Sourced by the scripts that run suites: a process that forks the ranks of their jobs (tests/forked_ranks.py).
#
#   start_fork_server FOLDER     starts it, waits until it is ready, and sets fork_server to its process id

start_fork_server() {
  mkdir -p "$1"
  # The variables are those that tests/run_parallel.py sets: the server declines jobs with another PYTHONPATH.
  PYTHONPATH="$PWD/tests:${PYTHONPATH:-}" GLOG_v=3 python tests/forked_ranks.py "$1" >/dev/null 2>&1 &
  fork_server=$!
  until [ -e "$1/python" ]; do
    # Without it, ranks import both themselves.
    kill -0 "$fork_server" 2>/dev/null || return 0
    sleep 0.2
  done
}
