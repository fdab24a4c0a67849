#!/usr/bin/env bash
# On a TPU VM: creates .venv with jax[tpu], this package and T5X, in pinned versions.
#   bash scripts/tpu/setup.sh [--dry-run] [--no-t5x] [--here]
#
#   --no-t5x  without T5X and t5
#   --here    into the environment of PYTHON (python3), as in Colab, whose JAX stays
#
# If there is no Python 3.11 or later, uv fetches one.
#
# Tested: the dry run; and on a CPU machine the same versions without jax[tpu], with T5X's
# programs imported from checkouts of these commits. Not tested: a TPU VM.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
set_up tpu "$@"
