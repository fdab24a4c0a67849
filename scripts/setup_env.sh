#!/usr/bin/env bash
# Sourced by demo.sh and test.sh: creates .venv once and installs the package in it.
#   setup_env EXTRA    EXTRA is an extra of setup.py, or empty
# PYTHON names the interpreter (default: the first that runs of python3.11,
# python3.12, python3).

say() { printf '\n== %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.11 or later found: install one, or name it in PYTHON" >&2
  return 1
}

setup_env() {
  local extra=$1 python stamp wanted
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python) || return 1
    say "creating .venv with $("$python" --version 2>&1)"
    "$python" -m venv .venv || return 1
  fi
  # One stamp for each extra, holding what was installed: an edit of setup.py
  # installs again, anything else reuses the environment.
  stamp=.venv/.installed-${extra:-base}
  wanted=$(cksum < setup.py)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing spec_t5x${extra:+[$extra]} (some minutes the first time)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      -e ".${extra:+[$extra]}" || return 1
    echo "$wanted" > "$stamp"
  else
    say "reusing .venv"
  fi
}
