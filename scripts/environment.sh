# Sourced by the other scripts: makes the virtual environment .venv, or takes the one that is there.
#
#   ensure_environment EXTRAS      e.g. mpi,quickstart; afterwards its programs are first on PATH
#
# PYTHON names the interpreter (default: the first of python3 and its versions that fits), VENV the folder (default: .venv
# beside setup.py), MINDSPORE the version (default: the one that all suites run on). mindnlp_dp/versions.py says which fit.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
MINDSPORE=${MINDSPORE:-$(sed -n 's/^BEST_MINDSPORE = "\(.*\)"$/\1/p' "$ROOT/mindnlp_dp/versions.py")}

# The line of versions.py that says it, as two numbers: from Python 3.FIRST to 3.LAST.
read -r FIRST_PYTHON LAST_PYTHON < <(
  sed -n 's/^PYTHON = ((3, \([0-9]*\)), (3, \([0-9]*\)))$/\1 \2/p' "$ROOT/mindnlp_dp/versions.py"
)

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

_what_is_installed() {
  echo "MindSpore $MINDSPORE, $(cat "$ROOT/setup.py" <(grep ' = ' "$ROOT/mindnlp_dp/versions.py") | cksum)"
}

ensure_environment() {
  local extras=$1 stamp python
  stamp=$VENV/.installed-${extras//,/-}
  mkdir -p "$(dirname "$VENV")"
  # One installation at a time, however many scripts were started; the lock ends with the subshell.
  (
    flock 9
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(_what_is_installed)" ] && [ -x "$VENV/bin/mindnlp-dp" ]; then
      exit 0
    fi
    if [ ! -x "$VENV/bin/python" ]; then
      python=$(_find_python) || exit 1
      echo "making a virtual environment in ${VENV#"$PWD"/} with $("$python" --version)"
      "$python" -m venv "$VENV" || exit 1
    fi
    echo "installing mindnlp_dp[$extras] and what it needs (about 3 GB; a minute or several)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[$extras]" \
      "mindspore==$MINDSPORE" || exit 1
    _what_is_installed >"$stamp"
  ) 9>"$VENV.lock" || return 1
  export PATH="$VENV/bin:$PATH"
}
