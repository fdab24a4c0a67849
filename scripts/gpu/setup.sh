#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: creates .venv with jax[cuda12], this package and T5X, in
# pinned versions. The driver must be there; CUDA comes with the wheels.
#   bash scripts/gpu/setup.sh [--dry-run] [--no-t5x]
#
# Tried: the dry run; and on a CPU machine the same versions without CUDA, with T5X's
# programs imported from checkouts of these commits. Not tried: a GPU.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
set_up_flags "$@"
go_to_repository
# shellcheck disable=SC2034  # setup_env reads it
CONSTRAINTS=scripts/constraints.txt

if [ -n "$NO_T5X" ]; then
  setup_env gpu
else
  setup_env gpu,t5x
  install_t5x
fi
run .venv/bin/python -c 'import jax; print(jax.__version__, jax.devices())'
