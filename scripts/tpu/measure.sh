#!/usr/bin/env bash
# Measures a TPU as scripts/gpu/measure.sh measures a GPU; its --help has the arguments.
#   bash scripts/tpu/measure.sh [--dry-run] [--tiny] [--minutes N] OUTPUT [STAGE…]
#
# Tested: the dry run, and --tiny on a CPU. Not tested: an accelerator.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
help_flag "$@"
export ACCELERATOR=tpu
exec bash "$(dirname "$0")/../gpu/measure.sh" "$@"
