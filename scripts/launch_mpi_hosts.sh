#!/usr/bin/env bash
# Launch a script with OpenMPI's mpirun on the CPUs of several hosts. Run this once, on the first host.
#
#   HOSTS=10.0.0.1:2,10.0.0.2:2 bash scripts/launch_mpi_hosts.sh SCRIPT ARGS...
#
#   HOSTS      ADDRESS:PROCESSES of each host, separated by commas
#   INTERFACE  network that the ranks use, such as 10.0.0.0/24         (default: OpenMPI's choice)
#   SSH_AGENT  program that starts a command on a host, called like ssh (default ssh)
#
# All hosts need this folder, the environment and the data under the same paths, and ssh without a password.
# Tested between two network namespaces of one machine (tests/two_hosts.sh).
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "error: $*" >&2
  exit 2
}

[ -n "${HOSTS:-}" ] || fail "HOSTS is not set; HOSTS=10.0.0.1:2,10.0.0.2:2 bash scripts/launch_mpi_hosts.sh SCRIPT ARGS..."
total=0
for host in ${HOSTS//,/ }; do
  count=${host##*:}
  case $host in *:*) ;; *) fail "HOSTS: '$host' has no number of processes; write $host:2" ;; esac
  case $count in '' | *[!0-9]* | 0) fail "HOSTS: '$host' must end with a number of processes of at least 1" ;; esac
  total=$((total + count))
done
[ $# -gt 0 ] || fail "which script? bash scripts/launch_mpi_hosts.sh SCRIPT ARGS..."
[ -f "$1" ] || fail "the script $1 does not exist"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$ROOT/.venv/bin/mpirun" ]; then
  PATH=$ROOT/.venv/bin:$PATH
fi
command -v mpirun >/dev/null || fail 'mpirun was not found; pip install "mindnlp-dp[mpi]", or activate its environment'

# Ranks bind themselves to cores, within those that their host grants them (mindnlp_dp/runtime/threads.py).
options=(--bind-to none --prtemca plm_ssh_agent "${SSH_AGENT:-ssh}" --mca pml ob1 --mca btl tcp,sm,self)
if [ -n "${INTERFACE:-}" ]; then
  options+=(--mca btl_tcp_if_include "$INTERFACE" --prtemca prte_if_include "$INTERFACE")
fi
if [ "$(id -u)" -eq 0 ]; then
  options+=(--allow-run-as-root)
fi
export DEVICE_TARGET=CPU GLOG_v=${GLOG_v:-3} PYTHONUNBUFFERED=1
# -m mpi4py: an exception on one rank ends the job.
exec mpirun -n "$total" --host "$HOSTS" "${options[@]}" -x PATH -x DEVICE_TARGET -x GLOG_v -x PYTHONUNBUFFERED \
  --wdir "$PWD" "$(command -v python)" -m mpi4py "$@"
