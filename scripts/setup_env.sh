#!/usr/bin/env bash
# Sourced by the other scripts: creates .venv once and installs the package in it.
#   help_flag ARGUMENTS   if the first is --help, prints the script's head and exits
#   setup_env EXTRAS      installs extras of setup.py, separated by commas; may be empty
#   set_up MACHINE ARGUMENTS   creates the environment of scripts/MACHINE/setup.sh (tpu or gpu)
#   install_browser       installs Debian's Chromium if there is none: tests open pages in it
#   launch ARGUMENTS      runs a command of spec-t5x or a program of T5X (t5x.infer …) in the
#                         repository, which paths are relative to; with SEVERAL_HOSTS=1 T5X's
#                         programs first connect to those of the other hosts
#   run COMMAND           runs it; with DRY_RUN=1 prints it instead, as the above do
# PYTHON is the interpreter (default: the first of python3.11, python3.12, python3.13 and
# python3 that is recent enough and has venv; without one, uv downloads Python 3.11).
# CONSTRAINTS is a constraints file for pip.

T5X_COMMIT=cc342d419ec3e3e9c4bf1df33c82330cafdc1e16
# T5X imports both. airio is not on PyPI, and jestimator's release there not of this JAX.
AIRIO_COMMIT=69897df7d9a427b947a9f7bb4164c7782b43e601
JESTIMATOR_COMMIT=326824a477feef6d92e6f44175000907a72899ca
# The environment's interpreter.
ENV_PYTHON=.venv/bin/python
# Connects the hosts, as Orbax requires and t5x.infer and t5x.eval do not, then runs T5X's program.
CONNECTED='import jax, runpy, sys; jax.distributed.initialize(); del sys.argv[0]; '
CONNECTED+='runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'

say() { printf '\n== %s\n' "$*" >&2; }

# Exits with an error message of the user's mistake.
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

run() {
  if [ -n "${DRY_RUN:-}" ]; then
    # In one write: commands that run at the same time must not mix their lines.
    printf '%s\n' "$(printf '%q ' "$@")"
  else
    "$@"
  fi
}

# Runs a command without its progress messages.
quietly() {
  if [ -n "${DRY_RUN:-}" ]; then
    run "$@"
  else
    "$@" >/dev/null
  fi
}

help_flag() {
  if [ "${1:-}" = --help ]; then
    sed -n '2,/^\([^#]\|$\)/s/^# \{0,1\}//p' "$0"
    exit
  fi
}

# dry_run_flag ARGUMENTS: the first may be --dry-run, --here or --help; REST has the others.
dry_run_flag() {
  help_flag "$@"
  while :; do
    case ${1:-} in
      --dry-run) DRY_RUN=1 ;;
      --here) in_pythons_environment ;;
      *) break ;;
    esac
    shift
  done
  REST=("$@")
}

# Uses the environment of PYTHON (python3) in place of .venv.
in_pythons_environment() {
  HERE=1
  ENV_PYTHON=${PYTHON:-python3}
}

go_to_repository() { cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1; }

# Prints the first interpreter that can create the environment.
find_python() {
  local candidate
  local -a candidates=(python3.11 python3.12 python3.13 python3 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    # Debian and Ubuntu have venv without ensurepip, which is in a separate package.
    if "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
    then
      echo "$candidate"
      return
    fi
  done
  return 1
}

create_env() {
  local python
  if python=$(find_python); then
    say "creating .venv with $("$python" --version 2>&1)"
    run "$python" -m venv .venv
  elif [ -n "${PYTHON:-}" ]; then
    die "PYTHON is $PYTHON, which is no Python 3.11 or later with venv: set another"
  else
    say "no Python 3.11 or later with venv is installed: downloading 3.11 with uv"
    create_env_with_uv ||
      die "Python 3.11 could not be downloaded: install it and set PYTHON"
  fi
}

create_env_with_uv() {
  local uv=uv
  if ! command -v uv >/dev/null; then
    uv=.uv/bin/uv
    # In the repository, so that the user's installation does not change.
    [ -x "$uv" ] || run python3 -m pip install --quiet --target .uv uv || return 1
  fi
  run "$uv" venv --quiet --seed --python 3.11 .venv
}

# Prints what keeps pip from replacing the installed JAX: its packages as requirements.
installed_jax() {
  "$ENV_PYTHON" -m pip list --format=freeze --disable-pip-version-check 2>/dev/null |
    grep -E '^(jax|jaxlib|jax[-_]cuda[^=]*|libtpu)==' || true
}

setup_env() {
  local extra=$1 stamp wanted
  local -a kept
  local -a install=("$ENV_PYTHON" -m pip install --quiet --disable-pip-version-check)
  go_to_repository || return 1
  if [ -n "${HERE:-}" ]; then
    say "installing spec_t5x${extra:+[$extra]} beside $("$ENV_PYTHON" --version 2>&1)"
    mapfile -t kept < <(installed_jax)
    run "${install[@]}" ".${extra:+[$extra]}" "${kept[@]}"
    return
  fi
  # Without pip if its creation was interrupted.
  "$ENV_PYTHON" -c 'import pip' 2>/dev/null || create_env || return 1
  # One stamp for each extra, holding what was installed: an edit of setup.py
  # installs again, anything else reuses the environment.
  stamp=.venv/.installed-${extra:-base}
  wanted=$(cat setup.py ${CONSTRAINTS:+"$CONSTRAINTS"} | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing spec_t5x${extra:+[$extra]} (some minutes the first time)"
    run "${install[@]}" ${CONSTRAINTS:+-c "$CONSTRAINTS"} -e ".${extra:+[$extra]}" || return 1
    if [ -z "${DRY_RUN:-}" ]; then
      echo "$wanted" > "$stamp"
    fi
  else
    say "reusing .venv"
  fi
}

# set_up MACHINE ARGUMENTS: MACHINE is tpu or gpu; the arguments are flags in any order.
set_up() {
  local machine=$1 flag extras no_t5x=
  help_flag "${@:2}"
  for flag in "${@:2}"; do
    case $flag in
      --dry-run) DRY_RUN=1 ;;
      --no-t5x) no_t5x=1 ;;
      --here) in_pythons_environment ;;
      *) die "unknown argument '$flag': give --dry-run, --no-t5x or --here" ;;
    esac
  done
  go_to_repository
  if [ -n "${HERE:-}" ]; then
    extras=
  else
    CONSTRAINTS=scripts/constraints.txt
    extras=$machine
  fi
  if [ -n "$no_t5x" ]; then
    setup_env "$extras"
  else
    setup_env "${extras:+$extras,}t5x"
    install_t5x
  fi
  run "$ENV_PYTHON" -m spec_t5x.machine.accelerators
}

# T5X requires flax, optax, seqio and more from git, at their latest commits, which
# breaks (its issues 1086 and 1413), and t5, most tasks' library, for nightly versions and
# PyTorch: --no-deps, and the extra t5x of setup.py from PyPI.
install_t5x() {
  local github=https://github.com
  say "installing T5X ${T5X_COMMIT:0:7} and t5"
  run "$ENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps "t5==0.9.4" \
    "airio @ git+$github/google/airio@$AIRIO_COMMIT" \
    "jestimator @ git+$github/google-research/jestimator@$JESTIMATOR_COMMIT" \
    "t5x @ git+$github/google-research/t5x@$T5X_COMMIT" || return 1
  run "$ENV_PYTHON" -c 'import t5.data, t5x.models, spec_t5x'
}

apt_install() {
  local -a as_root=(env DEBIAN_FRONTEND=noninteractive)
  command -v apt-get >/dev/null || return 1
  if [ "$(id -u)" -ne 0 ]; then
    # -n never asks for a password.
    as_root=(sudo -n "${as_root[@]}")
  fi
  quietly "${as_root[@]}" apt-get update -qq && quietly "${as_root[@]}" \
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@"
}

# If the installation fails, one line says so; tests that need the browser then fail.
install_browser() {
  if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    return
  fi
  say "installing Chromium"
  if ! apt_install chromium chromium-driver; then
    echo "Chromium could not be installed: apt-get install chromium chromium-driver" >&2
    return 1
  fi
}

environment() { # Prints PYTHON, the interpreter of .venv if there is one, or python3.
  if [ -z "${PYTHON:-}" ] && [ -x "$ENV_PYTHON" ]; then
    echo "$PWD/$ENV_PYTHON"
  else
    echo "${PYTHON:-python3}"
  fi
}

need_accelerator() { # PYTHON: JAX would compute on the CPU without a word if a GPU fails
  local found
  [ -z "${DRY_RUN:-}" ] || return 0
  found=$("$1" -m spec_t5x.machine.accelerators 2>&1 | tail -n 1) || true
  [[ $found == "jax.devices() is ["* && $found != *CpuDevice* ]] || die "no accelerator: $found"
}

launch() {
  local setup
  setup=$(dirname "$0")/setup.sh
  go_to_repository || return 1
  if [ $# -eq 0 ]; then
    die "nothing to launch: give a command of spec-t5x, or t5x.infer and its arguments"
  fi
  if ! command -v "$ENV_PYTHON" >/dev/null; then
    [ -n "${DRY_RUN:-}" ] || die "there is no .venv: run bash $setup first"
    say "first: bash $setup"
  elif [ -z "${DRY_RUN:-}" ] && ! "$ENV_PYTHON" -c 'import jaxtyping' 2>/dev/null; then
    die "$ENV_PYTHON lacks what spec_t5x requires: run bash $setup${HERE:+ --here} first"
  fi
  [ -z "${NEEDS_GPU:-}" ] || need_accelerator "$ENV_PYTHON"
  case $1 in
    t5x.*)
      if [ -n "${SEVERAL_HOSTS:-}" ]; then
        set -- -c "$CONNECTED" "$@"
      else
        set -- -m "$@"
      fi
      ;;
    *) set -- -m spec_t5x.cli.main "$@" ;;
  esac
  run "$ENV_PYTHON" "$@"
}

# If the script is run instead of sourced, it only prints its help.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  help_flag --help
fi
