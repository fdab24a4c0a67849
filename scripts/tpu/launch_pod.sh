#!/usr/bin/env bash
# From your machine, with gcloud: the same command on every host of a TPU pod slice.
#   TPU_NAME=… ZONE=… [PROJECT=…] bash scripts/tpu/launch_pod.sh [FLAG…] setup [--no-t5x]
#   TPU_NAME=… ZONE=… [PROJECT=…] bash scripts/tpu/launch_pod.sh [FLAG…] infer --multiprocess …
#   TPU_NAME=… ZONE=… [PROJECT=…] bash scripts/tpu/launch_pod.sh [FLAG…] t5x.infer …
#
#   FLAG  --dry-run, or --here as of setup.sh
#
# "setup" copies the committed files of this checkout to ~/spec_t5x of every host and runs
# scripts/tpu/setup.sh there, with its flags; --here comes first, and in every command. On
# TPUs jax.distributed needs no addresses: spec-t5x infer needs --multiprocess, and T5X's programs
# need no flag, since they are launched connected. All hosts must see the paths: gs:// for
# checkpoints, vocabularies and T5X; a shared file system with locks (Filestore, NFS) for the
# inputs and outputs of spec-t5x infer.
#
# Tested: the dry run; and on a CPU machine t5x.infer in two connected processes.
# Not tested: a pod slice.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
dry_run_flag "$@"
go_to_repository
if [ -z "${TPU_NAME:-}" ] || [ -z "${ZONE:-}" ]; then
  die "TPU_NAME is '${TPU_NAME:-}' and ZONE '${ZONE:-}': set both"
fi
if [ ${#REST[@]} -eq 0 ]; then
  die "nothing to launch: give setup, a command of spec-t5x, or t5x.infer"
fi
[ -n "${DRY_RUN:-}" ] || command -v gcloud >/dev/null ||
  die "gcloud is not installed: install the Google Cloud CLI"
here=${HERE:+ --here}
where=("$TPU_NAME" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"} --worker=all)

on_all() {
  run gcloud compute tpus tpu-vm ssh "${where[@]}" --command="$1"
}

if [ "${REST[0]}" = setup ]; then
  for flag in "${REST[@]:1}"; do
    [ "$flag" = --no-t5x ] || die "'$flag' after setup: give --no-t5x there, other flags before it"
  done
  archive=$(mktemp -d)/spec_t5x.tar.gz
  run git archive --prefix=spec_t5x/ -o "$archive" HEAD
  run gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:spec_t5x.tar.gz" "${where[@]:1}"
  # Parts of contrib that were removed since the last setup would still be registered.
  on_all "rm -rf spec_t5x/spec_t5x spec_t5x/gin_configs && tar xzf spec_t5x.tar.gz && \
bash spec_t5x/scripts/tpu/setup.sh$here${REST[1]+$(printf ' %q' "${REST[@]:1}")}"
  rm -rf "$(dirname "$archive")"
else
  on_all "cd spec_t5x && SEVERAL_HOSTS=1 bash scripts/tpu/launch.sh$here$(printf ' %q' "${REST[@]}")"
fi
