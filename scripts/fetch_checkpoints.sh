#!/usr/bin/env bash
# Copies public T5X checkpoints from gs://t5-data, with gcloud or gsutil; no account is
# needed. Checkpoints are copied to DIR/NAME, vocabularies to DIR/vocabularies; files that are
# there are not copied again, so that the same command continues.
#   bash scripts/fetch_checkpoints.sh [--dry-run] [--to DIR] NAME…
#   bash scripts/fetch_checkpoints.sh --list
#
# NAME is t5_1_0_SIZE, t5_1_1_SIZE, t5_1_1_lm100k_SIZE, flan_t5_SIZE, mt5_SIZE or byt5_SIZE
# with SIZE small, base, large, xl or xxl. An XXL takes 45 GB; spec-t5x reads gs:// paths
# itself, too.
#
# Tested: the dry run. Not tested: the download.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

BUCKET=gs://t5-data
SIZES=(small base large xl xxl)
FAMILIES=(t5_1_0 t5_1_1 t5_1_1_lm100k flan_t5 mt5 byt5)

# Prints the path of a checkpoint in the bucket, from T5X's list of models.
checkpoint_path() {
  local path
  case $1 in
    t5_1_0_small) path=t5_small/checkpoint_1000000 ;;
    t5_1_0_base) path=t5_base/checkpoint_999900 ;;
    t5_1_0_large) path=t5_large/checkpoint_1000700 ;;
    t5_1_0_xl) path=t5_3B/checkpoint_1000000 ;;
    t5_1_0_xxl) path=t5_11B/checkpoint_1000000 ;;
    t5_1_1_lm100k_*) path=$1/checkpoint_1100000 ;;
    flan_t5_small) path=$1/checkpoint_1198000 ;;
    flan_t5_base) path=$1/checkpoint_1184000 ;;
    flan_t5_large) path=$1/checkpoint_1164000 ;;
    flan_t5_xl) path=$1/checkpoint_1138000 ;;
    flan_t5_xxl) path=$1/checkpoint_1114000 ;;
    *) path=$1/checkpoint_1000000 ;;
  esac
  echo "pretrained_models/t5x/$path"
}

all_names() {
  local family size
  for family in "${FAMILIES[@]}"; do
    for size in "${SIZES[@]}"; do
      echo "${family}_$size"
    done
  done
}

copy() {
  if [ -z "${DRY_RUN:-}" ] && ! command -v gcloud > /dev/null; then
    gsutil -m cp -n -r "$1" "$2"
  else
    # Without an account gcloud reads nothing, not even what is public.
    run env CLOUDSDK_AUTH_DISABLE_CREDENTIALS=true \
      gcloud storage cp --no-clobber --recursive "$1" "$2"
  fi
}

fetch_vocabulary() {
  local file
  case $1 in
    byt5_*) return ;;
    mt5_*) file=mc4.250000.100extra ;;
    *) file=cc_all.32000.100extra ;;
  esac
  if [ ! -e "$to/vocabularies/$file/sentencepiece.model" ]; then
    copy "$BUCKET/vocabs/$file" "$to/vocabularies/"
  fi
}

to=checkpoints
names=()
while [ $# -gt 0 ]; do
  case $1 in
    --list)
      all_names
      exit
      ;;
    --dry-run) DRY_RUN=1 ;;
    --to)
      [[ ${2:-} != "" && $2 != -* ]] || die "--to is '${2:-}': give a folder after it"
      to=$2
      shift
      ;;
    *)
      # Not grep -q, which exits at the first match, so that the writer of the pipe fails.
      if ! all_names | grep -Fx -- "$1" > /dev/null; then
        die "no checkpoint '$1': --list shows the names"
      fi
      names+=("$1")
      ;;
  esac
  shift
done
if [ ${#names[@]} -eq 0 ]; then
  die "nothing to fetch: give names, or --list"
fi
if [ -z "${DRY_RUN:-}" ] && ! command -v gcloud > /dev/null && ! command -v gsutil > /dev/null; then
  die "neither gcloud nor gsutil is installed: install the Google Cloud CLI"
fi
run mkdir -p "$to/vocabularies"
for name in "${names[@]}"; do
  run mkdir -p "$to/$name"
  copy "$BUCKET/$(checkpoint_path "$name")" "$to/$name/"
  fetch_vocabulary "$name"
done
