#!/usr/bin/env bash
# Build a wheel of this tree, install it into an empty environment, and run the main job from another folder.
#
#   bash scripts/test_wheel.sh          takes about two minutes and, temporarily, 3 GB in the folder for temporary files
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$(_find_python)
"$python" -m venv "$folder/venv"
export PATH="$folder/venv/bin:$PATH"
# Build from a copy: files that an earlier build left in the tree would get into the wheel.
mkdir "$folder/tree"
cp -r "$ROOT"/{setup.py,pyproject.toml,README.md,LICENSE,mindnlp_dp} "$folder/tree"
find "$folder/tree" -name __pycache__ -prune -exec rm -r {} +
python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" "$folder/tree"
wheel=$(echo "$folder"/mindnlp_dp-*.whl)
python - "$wheel" "$folder/tree" <<'PYTHON'
import sys, zipfile
from pathlib import Path

packed = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if name.startswith("mindnlp_dp/")}
tree = Path(sys.argv[2])
there = {str(path.relative_to(tree)) for path in (tree / "mindnlp_dp").rglob("*") if path.is_file()}
if packed != there:
    sys.exit(f"the wheel and the tree differ by {', '.join(sorted(packed ^ there))}")
PYTHON
echo "installing $(basename "$wheel") into an empty environment"
python -m pip install --quiet --no-compile --disable-pip-version-check "$wheel[cpu,mpi,quickstart,report]" "mindspore==$(_mindspore python)"

# Copy only the script and its settings, so that the package must come from the wheel.
cp "$ROOT/scripts/finetune.py" "$ROOT/configs/quickstart_short_cpu.yaml" "$folder"
cd "$folder"
unset PYTHONPATH
python -c 'import mindnlp_dp, pathlib, sys
home = pathlib.Path(mindnlp_dp.__file__)
assert pathlib.Path(sys.prefix) in home.parents, f"{home} is not the wheel'"'"'s"'
DEVICE_TARGET=CPU mindnlp-dp run --nproc 2 finetune.py --config quickstart_short_cpu.yaml --output-dir out
mindnlp-dp report out
python -c 'import json
report = json.load(open("out/report.json"))
assert report["replicas_in_sync"] and report["world_size"] == 2 and report["eval_accuracy"] > 0.35, report'
echo "the wheel works"
