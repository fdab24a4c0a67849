#!/usr/bin/env bash
# On a machine with a GPU, after setup.sh: a command of spec-t5x, or a program of T5X.
#   bash scripts/gpu/launch.sh [--dry-run] [--here] benchmark --gin_file=…
#   bash scripts/gpu/launch.sh [--dry-run] [--here] t5x.infer --gin_file=…
#
# --here is needed after setup.sh --here. The default dtype is bfloat16;
# CUDA_VISIBLE_DEVICES picks the GPU.
#
# Tested: the dry run, and the commands on a CPU machine. Not tested: a GPU.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
dry_run_flag "$@"
# Fails if no GPU is found, rather than computing on the CPU; JAX_PLATFORMS=cpu asks for that.
[ -n "${JAX_PLATFORMS:-}" ] || export NEEDS_GPU=1 JAX_PLATFORMS=cuda,cpu
# TensorFlow reads the data and needs no GPU; JAX takes what it needs of the memory.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}
# Loops as CUDA graphs, for T5X's programs too (spec_t5x/machine/xla_flags.py). Your flags win.
export XLA_FLAGS="--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL ${XLA_FLAGS:-}"
launch "${REST[@]}"
