# Sourced by the scripts that run suites: a process that has imported MindSpore and MindNLP, and forks the ranks of the
# parallel suite.
#
#   start_fork_server SOCKET     starts it, waits until it is ready, and sets fork_server to its process id

start_fork_server() {
  # The variables are those that tests/run_parallel.py sets: the server declines jobs with another PYTHONPATH.
  PYTHONPATH="$PWD/tests:${PYTHONPATH:-}" GLOG_v=3 \
    python -m mindnlp_dp.launch.processes.fork_server "$1" >/dev/null 2>&1 &
  fork_server=$!
  until [ -S "$1" ]; do
    # Without it, ranks import both themselves.
    kill -0 "$fork_server" 2>/dev/null || return 0
    sleep 0.2
  done
}
