# Sourced by the other scripts: creates a virtual environment, or reuses the existing one.
#
#   ensure_environment EXTRAS      e.g. mpi,quickstart; puts the environment's programs first on PATH
#
# Variables:
#   PYTHON     the interpreter (default: the first supported one of python3, python3.12, ...)
#   MINDNLP    the series of MindNLP: 0.4 (default) or 0.5
#   VENV       the folder (default: .venv beside setup.py; .venv-mindnlp-0.5 for 0.5)
#   MINDSPORE  the version, for MindNLP 0.4 only (default: the one that all test suites run on)
# mindnlp_dp/runtime/versions.py lists the supported versions.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MINDNLP=${MINDNLP:-0.4}
case $MINDNLP in
  0.4) VENV=${VENV:-$ROOT/.venv} ;;
  0.5) VENV=${VENV:-$ROOT/.venv-mindnlp-0.5} ;;
  *) echo "error: MINDNLP must be 0.4 or 0.5, got '$MINDNLP'" >&2; exit 2 ;;
esac
if [ "$MINDNLP" = 0.5 ] && [ -n "${MINDSPORE:-}" ]; then
  echo "error: MINDSPORE=$MINDSPORE is for MindNLP 0.4; for 0.5 scripts/requirements_mindnlp_0_5.txt says which; unset it" >&2
  exit 2
fi
NEEDED_BY_MINDNLP_0_5=$ROOT/scripts/requirements_mindnlp_0_5.txt

# Reads the supported range, Python 3.FIRST to 3.LAST, from the line PYTHON = ... of versions.py.
read -r FIRST_PYTHON LAST_PYTHON < <(
  sed -n 's/^PYTHON = ((3, \([0-9]*\)), (3, \([0-9]*\)))$/\1 \2/p' "$ROOT/mindnlp_dp/runtime/versions.py"
)

_version_of() {
  "$1" -c 'import sys; print("Python", ".".join(map(str, sys.version_info[:2])))'
}

_python_fits() {
  local minor
  minor=$("$1" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)' 2>/dev/null) &&
    [ "$minor" -ge "$FIRST_PYTHON" ] && [ "$minor" -le "$LAST_PYTHON" ]
}

_find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 $(seq -f 'python3.%g' "$LAST_PYTHON" -1 "$FIRST_PYTHON")}; do
    if _python_fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.$FIRST_PYTHON to 3.$LAST_PYTHON is needed, and ${PYTHON:-python3} is not; set PYTHON=/path/to/one" >&2
  return 1
}

# _mindspore PYTHON: prints the version of MindSpore to install for this interpreter.
_mindspore() {
  if [ "$MINDNLP" = 0.5 ]; then
    sed -n 's/^mindspore==//p' "$NEEDED_BY_MINDNLP_0_5"
  else
    echo "${MINDSPORE:-$("$1" -c 'import runpy, sys; print(runpy.run_path(sys.argv[1])["BEST_MINDSPORE"])' \
      "$ROOT/mindnlp_dp/runtime/versions.py")}"
  fi
}

_what_is_installed() {
  echo "MindNLP $MINDNLP, MindSpore $(_mindspore "$1"), $(
    cat "$ROOT/setup.py" "$NEEDED_BY_MINDNLP_0_5" "$ROOT/scripts/environment.sh" \
      <(grep ' = ' "$ROOT/mindnlp_dp/runtime/versions.py") | cksum
  )"
}

_pip_install() {
  # --no-compile: Python compiles a module when it first imports it; all of them would take as long as the rest.
  "$VENV/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$@"
}

_install() {
  if [ "$MINDNLP" = 0.4 ]; then
    _pip_install --editable "$ROOT[cpu,$1]" "mindspore==$(_mindspore "$VENV/bin/python")"
  else
    # --no-deps: the dependencies of these packages include PyTorch with CUDA, which nothing here uses.
    _pip_install --requirement "$NEEDED_BY_MINDNLP_0_5" &&
      _pip_install --no-deps mindnlp==0.5.1 accelerate==1.10.1 peft==0.17.1 &&
      _pip_install --no-deps --editable "$ROOT"
  fi
}

ensure_environment() {
  local extras=$1 stamp python wanted
  stamp=$VENV/.installed-${extras//,/-}
  # With MindNLP 0.5 the extras do not matter: its environment has everything that the scripts need.
  [ "$MINDNLP" = 0.4 ] || stamp=$VENV/.installed
  mkdir -p "$(dirname "$VENV")"
  # Only one script installs at a time; the lock is released when the subshell ends.
  (
    flock 9
    python=$VENV/bin/python
    [ -x "$python" ] || python=$(_find_python) || exit 1
    if [ -n "${PYTHON:-}" ] && [ "$(_version_of "$PYTHON")" != "$(_version_of "$python")" ]; then
      echo "error: PYTHON=$PYTHON is not that of ${VENV#"$PWD"/}, which has $(_version_of "$python"); take another folder, as VENV=\$PWD/.venv-2, or remove it" >&2
      exit 1
    fi
    wanted=$(_what_is_installed "$python") || exit 1
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$VENV/bin/mindnlp-dp" ]; then
      exit 0
    fi
    if [ ! -x "$VENV/bin/python" ]; then
      echo "making a virtual environment in ${VENV#"$PWD"/} with $("$python" --version)"
      "$python" -m venv "$VENV" || exit 1
    fi
    echo "installing MindNLP $MINDNLP, mindnlp_dp[$extras] and what they need (2 to 3 GB; a minute or several)"
    # This installation may change packages that other extras need: remove the outdated stamps.
    grep --null --files-without-match --fixed-strings --line-regexp "$wanted" "$VENV"/.installed* 2>/dev/null |
      xargs --null --no-run-if-empty rm --
    _install "$extras" || exit 1
    echo "$wanted" >"$stamp"
  ) 9>"$VENV.lock" || return 1
  export PATH="$VENV/bin:$PATH"
}
