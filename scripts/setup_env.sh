#!/usr/bin/env bash
# Sourced by the other scripts: creates .venv once and installs the package in it.
#   setup_env EXTRAS    extras of setup.py, parted by commas, or empty
#   install_t5x         T5X at the commit that the plug-in was tested with
#   install_browser     Debian's Chromium, where none is: tests open the report in it
#   launch ARGUMENTS    a command of spec-t5x, or a program of T5X (t5x.infer …), in the
#                       repository, which paths are relative to
#   run COMMAND         runs it; with DRY_RUN=1 prints it instead, as the above do
# PYTHON names the interpreter (default: the first that runs of python3.11,
# python3.12, python3). CONSTRAINTS names a file of versions to keep to.

T5X_COMMIT=cc342d419ec3e3e9c4bf1df33c82330cafdc1e16
# T5X imports both. airio is not on PyPI, and jestimator's release there not of this JAX.
AIRIO_COMMIT=69897df7d9a427b947a9f7bb4164c7782b43e601
JESTIMATOR_COMMIT=326824a477feef6d92e6f44175000907a72899ca

say() { printf '\n== %s\n' "$*" >&2; }

# A mistake of the user's.
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

run() {
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# Without what the command says of its progress.
quietly() {
  if [ -n "${DRY_RUN:-}" ]; then
    run "$@"
  else
    "$@" >/dev/null
  fi
}

# set_up_flags ARGUMENTS: those of a set-up, in any order; NO_T5X is 1 for --no-t5x.
set_up_flags() {
  local flag
  NO_T5X=
  for flag in "$@"; do
    # shellcheck disable=SC2034  # the set-ups read NO_T5X
    case $flag in
      --dry-run) DRY_RUN=1 ;;
      --no-t5x) NO_T5X=1 ;;
      *) die "unknown argument '$flag': give --dry-run or --no-t5x" ;;
    esac
  done
}

# dry_run_flag ARGUMENTS: the first may be --dry-run; REST has the others.
dry_run_flag() {
  if [ "${1:-}" = --dry-run ]; then
    DRY_RUN=1
    shift
  fi
  REST=("$@")
}

go_to_repository() { cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1; }

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
  local -a constraints=()
  go_to_repository || return 1
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python) || return 1
    say "creating .venv with $("$python" --version 2>&1)"
    run "$python" -m venv .venv || return 1
  fi
  if [ -n "${CONSTRAINTS:-}" ]; then
    constraints=(-c "$CONSTRAINTS")
  fi
  # One stamp for each extra, holding what was installed: an edit of setup.py
  # installs again, anything else reuses the environment.
  stamp=.venv/.installed-${extra:-base}
  wanted=$(cat setup.py ${CONSTRAINTS:+"$CONSTRAINTS"} | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing spec_t5x${extra:+[$extra]} (some minutes the first time)"
    run .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      "${constraints[@]}" -e ".${extra:+[$extra]}" || return 1
    if [ -z "${DRY_RUN:-}" ]; then
      echo "$wanted" > "$stamp"
    fi
  else
    say "reusing .venv"
  fi
}

# T5X asks for flax, optax, seqio and more from git, at whatever state they are in, which
# breaks (its issues 1086 and 1413): --no-deps, and the extra t5x of setup.py from PyPI.
install_t5x() {
  local github=https://github.com
  say "installing T5X ${T5X_COMMIT:0:7}"
  run .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
    "airio @ git+$github/google/airio@$AIRIO_COMMIT" \
    "jestimator @ git+$github/google-research/jestimator@$JESTIMATOR_COMMIT" \
    "t5x @ git+$github/google-research/t5x@$T5X_COMMIT" || return 1
  run .venv/bin/python -c 'import t5x.models, spec_t5x'
}

# One line where it cannot: the tests that need the browser then fail and say so, too.
install_browser() {
  local -a as_root=(env DEBIAN_FRONTEND=noninteractive)
  if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    return
  fi
  if ! command -v apt-get >/dev/null; then
    echo "no Chromium and no apt-get: install chromium and chromedriver" >&2
    return 1
  fi
  if [ "$(id -u)" -ne 0 ]; then
    # Without asking for a password.
    as_root=(sudo -n "${as_root[@]}")
  fi
  say "installing Chromium"
  if ! quietly "${as_root[@]}" apt-get update -qq || ! quietly "${as_root[@]}" \
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 \
    chromium chromium-driver; then
    echo "Chromium could not be installed: apt-get install chromium chromium-driver" >&2
    return 1
  fi
}

launch() {
  go_to_repository || return 1
  if [ $# -eq 0 ]; then
    die "nothing to launch: give a command of spec-t5x, or t5x.infer and its arguments"
  fi
  case $1 in
    t5x.*) set -- -m "$@" ;;
    *) set -- -m spec_t5x.cli.main "$@" ;;
  esac
  run .venv/bin/python "$@"
}
