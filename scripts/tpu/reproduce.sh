#!/usr/bin/env bash
# On a TPU VM: sets it up, fetches public T5 1.0 and reproduces the paper's Tables 2, 3 and 5.
#   bash scripts/tpu/reproduce.sh [FLAG…] OUTPUT [NAME…] [-- ARGUMENTS]
#   bash scripts/tpu/reproduce.sh public t5_1_0_xxl t5_1_0_small t5_1_0_base t5_1_0_large
#
#   OUTPUT     gets the report; the same command continues a run that was stopped
#   NAME       t5_1_0_SIZE of scripts/fetch_checkpoints.sh: the target is the largest that the
#              chip's memory holds, smaller ones draft. Without a name the models are the Hub's.
#   ARGUMENTS  of spec-t5x reproduce public: --target, --data, --quick, …
#   --to DIR   folder of the checkpoints (checkpoints)
#   --dry-run  prints the commands; --no-t5x and --here are those of setup.sh
#
# Paths are relative to the repository. A checkpoint takes 4 bytes a parameter of disk: 45 GB for
# xxl, 11 GB for xl.
#
# Tested: the dry run. Not tested: a TPU VM, and the download.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
help_flag "$@"
to=checkpoints output="" flags=() names=() arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) DRY_RUN=1 flags+=("$1") ;;
    --no-t5x | --here) flags+=("$1") ;;
    --to)
      [[ ${2:-} != "" && $2 != -* ]] || die "--to is '${2:-}': give a folder after it"
      to=$2
      shift
      ;;
    --)
      shift
      arguments=("$@")
      break
      ;;
    -*) die "unknown argument '$1': see --help; those of spec-t5x follow --" ;;
    *) if [ -z "$output" ]; then output=$1; else names+=("$1"); fi ;;
  esac
  shift
done
[ -n "$output" ] || die "no output: give a folder for the report"
for name in "${names[@]}"; do
  [[ $name =~ ^t5_1_0_(small|base|large|xl|xxl)$ ]] ||
    die "no public T5 1.0 '$name': give t5_1_0_SIZE with small, base, large, xl or xxl"
done
go_to_repository

if [ ${#names[@]} -gt 0 ]; then
  bash scripts/fetch_checkpoints.sh ${DRY_RUN:+--dry-run} --to "$to" "${names[@]}"
  arguments=(--models "$to" "${arguments[@]}")
fi
set_up tpu "${flags[@]}"
# Tasks and metrics, which T5X's extra has too, and the report.
setup_env tasks,eval,plots
# Only one process can use the TPU: fails if it is taken, rather than computing on the CPU.
export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu}
launch reproduce public --output "$output" "${arguments[@]}"
