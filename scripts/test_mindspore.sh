#!/usr/bin/env bash
# The single-process suite, and the parallel one with two ranks under MPI, on another MindSpore than the default.
# Makes or reuses .venv-mindspore-VERSION.
#
#   bash scripts/test_mindspore.sh 2.10.0
set -uo pipefail
[ $# -eq 1 ] || { echo "which MindSpore? bash scripts/test_mindspore.sh 2.10.0" >&2; exit 2; }
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MINDSPORE=$1
VENV=$ROOT/.venv-mindspore-$1
source "$ROOT/scripts/environment.sh"
cd "$ROOT" || exit 1
ensure_environment mpi,quickstart,report,homework,docs,dev || exit 1
export DEVICE_TARGET=CPU
echo "=== MindSpore $(python -c 'import importlib.metadata; print(importlib.metadata.version("mindspore"))')"
python -m pytest -q tests/single && python tests/run_parallel.py --launcher mpi --world-size 2
