#!/usr/bin/env bash
# On one TPU host, after setup.sh: a command of spec-t5x, or a program of T5X.
#   bash scripts/tpu/launch.sh [--dry-run] [--here] benchmark --gin_file=…
#   bash scripts/tpu/launch.sh [--dry-run] [--here] t5x.infer --gin_file=…
#
# --here is needed after setup.sh --here. The default dtype is bfloat16. launch_pod.sh runs this
# script on every host of a pod slice, with SEVERAL_HOSTS=1, by which T5X's programs connect.
#
# Tested: the dry run, and the commands on a CPU machine. Not tested: a TPU VM.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
dry_run_flag "$@"
# Only one process can use the TPU: fails if it is taken, rather than computing on the CPU.
export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu}
launch "${REST[@]}"
