# Simulate two hosts on one machine by two connected network namespaces. Source this file; needs root and iproute2.
#
#   source two_namespaces.sh; open_two_hosts || exit 0      prints the reason if the machine does not allow it
#
# Sets $first and $second (the hosts), $network (their addresses are .1 and .2), $work (a folder for this run only) and
# $agent (the command with which mpirun starts a process on the second host). All are removed when the script ends.

open_two_hosts() {
  if [ "$(id -u)" -ne 0 ] || ! command -v ip >/dev/null; then
    echo "skipped: two network namespaces need root and iproute2 (apt-get install iproute2)"
    return 1
  fi
  # Names that are unique to this run, so that two runs do not collide.
  local tag=$$ side name wire number
  first=dpA$tag second=dpB$tag
  network=10.$((RANDOM % 200 + 20)).$((RANDOM % 250))
  work=$(mktemp -d)
  trap close_two_hosts EXIT
  if ! ip netns add "$first" 2>"$work/no"; then
    echo "skipped: this machine grants no network namespaces ($(cat "$work/no"))"
    return 1
  fi
  ip netns add "$second"
  ip link add "vA$tag" netns "$first" type veth peer name "vB$tag" netns "$second"
  for side in "$first vA$tag 1" "$second vB$tag 2"; do
    read -r name wire number <<<"$side"
    ip -n "$name" addr add "$network.$number/24" dev "$wire"
    ip -n "$name" link set "$wire" up
    ip -n "$name" link set lo up
  done
  cores=($(python -c 'import os; c = sorted(os.sched_getaffinity(0)); print(c[0], c[-1])'))
  agent=$work/agent
  cat >"$agent" <<AGENT
#!/usr/bin/env bash
# Called as ssh is: HOST COMMAND...
while [[ \$1 == -* ]]; do shift; done
shift
exec ip netns exec $second unshare --uts taskset -c ${cores[1]} bash -c 'hostname $second; exec bash -c "\$*"' agent "\$@"
AGENT
  chmod +x "$agent"
}

close_two_hosts() {
  ip netns pids "$first" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns pids "$second" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns del "$first" 2>/dev/null || true
  ip netns del "$second" 2>/dev/null || true
  rm -rf "$work"
}

# limit_wire RATE: limit the connection in each direction to RATE, such as 1gbit.
limit_wire() {
  tc -n "$first" qdisc add dev "vA$$" root tbf rate "$1" burst 1mb latency 50ms
  tc -n "$second" qdisc add dev "vB$$" root tbf rate "$1" burst 1mb latency 50ms
}

# enter NAMESPACE COMMAND...: run a command on that host, with its own host name and core.
enter() {
  local name=$1 core=${cores[0]}
  shift
  [ "$name" = "$first" ] || core=${cores[1]}
  ip netns exec "$name" unshare --uts taskset -c "$core" bash -c 'hostname "$0"; exec "$@"' "$name" "$@"
}

# on_both SCRIPT ARGS...: one rank on each host, under mpirun, as a user would start them.
on_both() {
  enter "$first" env HOSTS="$network.1:1,$network.2:1" INTERFACE="$network.0/24" SSH_AGENT="$agent" \
    bash "$ROOT/scripts/launch_mpi_hosts.sh" "$@"
}
