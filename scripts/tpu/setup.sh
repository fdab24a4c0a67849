#!/usr/bin/env bash
# On a TPU VM: creates .venv with jax[tpu], this package and T5X, in pinned versions.
#   bash scripts/tpu/setup.sh [--dry-run] [--no-t5x]
#
# Tried: the dry run; and on a CPU machine the same versions without jax[tpu], with T5X's
# programs imported from checkouts of these commits. Not tried: a TPU VM. Where its Python is
# older than 3.11, uv fetches one.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
set_up_flags "$@"
go_to_repository
CONSTRAINTS=scripts/constraints.txt

if ! find_python > /dev/null 2>&1 && [ ! -x .venv/bin/python ]; then
  say "fetching Python 3.11"
  run python3 -m pip install --quiet --user uv
  run python3 -m uv python install 3.11
  if [ -z "${DRY_RUN:-}" ]; then
    PYTHON=$(python3 -m uv python find 3.11)
    export PYTHON
  fi
fi
if [ -n "$NO_T5X" ]; then
  setup_env tpu
else
  setup_env tpu,t5x
  install_t5x
fi
run .venv/bin/python -c 'import jax; print(jax.__version__, jax.devices())'
