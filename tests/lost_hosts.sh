#!/usr/bin/env bash
# Train on two hosts (two network namespaces of one machine), started by the same command on each; then lose one host.
#
#   bash tests/lost_hosts.sh [--all]       needs root and iproute2
#
# With --all also a cable that is pulled, and a host that is killed under MindSpore's transport.
#
# Passes if an elastic job continues without a host that was killed, or whose cable was pulled, uses both hosts again
# when it is back, and ends with the weights of an undisturbed job up to rounding; if the other host's launcher and its
# ranks end after the endpoint's host was killed; and if no process is left on either host.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"
ensure_environment mpi,quickstart,report,homework,docs,dev
source "$ROOT/tests/two_namespaces.sh"
open_two_hosts || exit 0
export MINDNLP_DP_RDZV_TOKEN PYTHONPATH=$ROOT/tests:$ROOT
MINDNLP_DP_RDZV_TOKEN=$(python -c 'import secrets; print(secrets.token_hex())')
# processes_on HOST: print the ids of that host's processes.
processes_on() { ip netns pids "$1"; }

port=29400 all=
[ "${1:-}" != --all ] || all=1

# start HOST: run the command on that host.
start() {
  enter "$1" python -m mindnlp_dp run --nnodes 1:2 --nproc-per-node 1 --backend "$backend" --log-dir "$run/logs" \
    --rdzv-endpoint "$network.1:$port" --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=4 \
    "$ROOT/tests/failure/elastic.py" "$run" --updates "$updates" --seconds "$pause" --save-steps 10 >>"$run/$1.out" 2>&1
}

# until_updates N [RANKS]: wait until N updates are done (by RANKS ranks).
until_updates() {
  local waited=0 done=0
  until [ "$done" -ge "$1" ]; do
    sleep 0.3
    done=$(grep -c " ${2:-.}$" "$run/sizes" 2>/dev/null) || done=${done:-0}
    waited=$((waited + 1))
    [ $waited -lt 400 ] || { echo "no progress:"; tail -n 30 "$run"/*.out; exit 1; }
  done
}

nothing_left() {
  sleep 1
  if processes_on "$first" | grep . || processes_on "$second" | grep .; then
    echo "processes are left"
    exit 1
  fi
}

# job NAME BACKEND UPDATES PAUSE: make a folder for the job, and start it on both hosts.
job() {
  run=$work/$1 backend=$2 updates=$3 pause=$4 port=$((port + 1))
  mkdir "$run"
  start "$first" & head=$!
  start "$second" & other=$!
}

# finish: check that both launchers end with 0, and that the weights are those of the undisturbed job.
finish() {
  local name
  wait $head || { echo "the first host's launcher ended with $?"; tail -n 30 "$run"/*.out; exit 1; }
  wait $other || { echo "the second host's launcher ended with $?"; tail -n 30 "$run"/*.out; exit 1; }
  nothing_left
  python - "$work/undisturbed" "$run" <<'PYTHON'
import json, sys
import numpy as np
whole, run = (np.load(f"{folder}/weights.npz") for folder in sys.argv[1:])
worst = max(float(abs(whole[name] - run[name]).max()) for name in whole)
assert worst < 2e-3, f"weights differ by {worst}"
sizes = json.load(open(f"{sys.argv[2]}/result.json"))["sizes"]
print(f"  updates by two hosts: {sizes.count(2)}, by one: {sizes.count(1)}; weights within {worst:.1g}")
PYTHON
}

echo "undisturbed"
job undisturbed mpi 60 0
finish
for backend in mpi ${all:+mindspore}; do
  echo "$backend: a host is killed, and comes back"
  job "killed_$backend" $backend 60 0.3
  until_updates 15
  processes_on "$second" | xargs kill -9
  wait $other || true
  until_updates 3 1
  start "$second" & other=$!
  finish
done
# One backend is enough here: the messages between launchers do not depend on it.
if [ -n "$all" ]; then
  echo "a cable is pulled, and put back"
  job cable mpi 60 0.3
  until_updates 15
  ip -n "$first" link set "vA$$" down
  until_updates 3 1
  ip -n "$first" link set "vA$$" up
  finish
  grep -q "no message came from it for 4 s" "$run/$first.out" || { echo "it was not named"; exit 1; }
fi
echo "the endpoint's host is killed"
job head mpi 60 0.3
until_updates 15
processes_on "$first" | xargs kill -9
wait $head || true
code=0
wait $other || code=$?
[ $code -eq 83 ] || { echo "the other launcher ended with $code, not 83"; tail -n 30 "$run"/*.out; exit 1; }
nothing_left
echo "  the other host's launcher ended with 83, and its ranks with it"
