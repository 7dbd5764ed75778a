#!/usr/bin/env bash
# The suites of the Trainer on MindNLP 0.5.1, with two ranks under MPI, and a few of them under MindSpore's own transport.
# Makes or reuses .venv-mindnlp-0.5 (2 GB, without PyTorch).
#
#   bash scripts/test_mindnlp_0_5.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-$PWD/.venv-mindnlp-0.5}
source scripts/environment.sh

pip() { "$VENV/bin/pip" install --quiet --disable-pip-version-check "$@"; }
needed=$(cat scripts/requirements_mindnlp_0_5.txt scripts/test_mindnlp_0_5.sh | cksum)
if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$needed" ]; then
  python=$(_find_python)
  "$python" -m venv "$VENV"
  echo "installing MindNLP 0.5.1 and what it needs (2 GB; a minute or several)"
  pip --requirement scripts/requirements_mindnlp_0_5.txt
  pip --no-deps mindnlp==0.5.1 accelerate==1.10.1 peft==0.17.1
  pip --no-deps --editable .
  echo "$needed" >"$VENV/.installed"
fi
export PATH="$VENV/bin:$PATH" DEVICE_TARGET=CPU

files=()
for name in trainer equivalence decisions resuming evaluation bad_losses models transformers_trainer; do
  files+=("tests/parallel/test_$name.py")
done
python tests/run_parallel.py --launcher mpi --world-size 2 "${files[@]}"
python tests/run_parallel.py --launcher mindspore --world-size 2 tests/parallel/test_equivalence.py
