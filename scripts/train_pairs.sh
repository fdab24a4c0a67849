#!/usr/bin/env bash
# Trains the demonstration's models from the texts alone, on the devices JAX finds: targets for
# English-German and for summaries, each with its drafts, tables and head.
#   bash scripts/train_pairs.sh [--dry-run] --data DIR --output DIR [STAGE…]
#                               [-- --gin.NAME=VALUE …]
#
#   --data DIR    holds ende/{train,dev}.tsv.gz and summarize/debian_{train,dev}.tsv.gz
#   --output DIR  a folder for each stage; the same command resumes from what is in it, also on
#                 another machine, to which it was copied
#   STAGE         in this order: target target_more ngram draft draft_more eagle
#                 summaries_target summaries_target_more summaries_draft
#                 summaries_draft_more summaries_ngram summaries_eagle (all of them)
#   --gin.…       for every training, such as --gin.TrainOptions.max_minutes=8.0; a training
#                 that is out of time ends the script with status 75, and resumes when the same
#                 command is run again
#
# SPEC_T5X names the command (spec-t5x of .venv). On two processors all of it takes a day.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

STAGES=(target target_more ngram draft draft_more eagle
  summaries_target summaries_target_more summaries_draft summaries_draft_more summaries_ngram
  summaries_eagle)

data="" output=""
stages=() flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) DRY_RUN=1 ;;
    --data | --output)
      [ $# -gt 1 ] || die "$1 is the last argument: give a directory after it"
      printf -v "${1#--}" %s "$(realpath -m "$2")"
      shift
      ;;
    --)
      shift
      flags=("$@")
      break
      ;;
    -*) die "unknown argument '$1': see --help" ;;
    *)
      [[ " ${STAGES[*]} " == *" $1 "* ]] || die "no stage '$1': choose of ${STAGES[*]}"
      stages+=("$1")
      ;;
  esac
  shift
done
[ -n "$data" ] || die "no data: give --data DIR"
[ -n "$output" ] || die "no output: give --output DIR"
for folder in ende summarize; do
  [ -d "$data/$folder" ] || die "no folder $data/$folder: give --data the folder that holds it"
done
[ ${#stages[@]} -gt 0 ] || stages=("${STAGES[@]}")

go_to_repository
SPEC_T5X=${SPEC_T5X:-.venv/bin/spec-t5x}
[ -n "${DRY_RUN:-}" ] || command -v "$SPEC_T5X" > /dev/null ||
  die "no command $SPEC_T5X: run bash scripts/demo.sh and .venv/bin/pip install -e '.[train]', \
or name another in SPEC_T5X"

# A signal to the script stops the training, too: a rerun beside it would write to the
# same folder.
child=""
stop() {
  trap '' TERM HUP INT
  if [ -n "$child" ]; then
    kill -TERM "$child" 2> /dev/null || true
    wait "$child" || true
  fi
  exit $((128 + $1))
}
trap 'stop 1' HUP
trap 'stop 2' INT
trap 'stop 15' TERM

# Runs a command in the background, so that bash handles a signal before the command ends.
waited() {
  if [ -n "${DRY_RUN:-}" ]; then
    run "$@"
    return
  fi
  "$@" &
  child=$!
  wait "$child"
  child=""
}

# training STAGE COMMAND GIN_FILE FLAGS: trains on English-German pairs, into the stage's folder.
training() {
  local stage=$1 command=$2 file=$3
  shift 3
  waited "$SPEC_T5X" "$command" "--gin_file=gin_configs/runs/$file.gin" \
    "--gin.DATA_DIR='$data/ende'" "--gin.OUTPUT_DIR='$output/$stage'" \
    "$@" ${flags[@]+"${flags[@]}"}
}

# summaries STAGE COMMAND GIN_FILE FLAGS: as training, on the texts of summaries.
summaries() {
  training "$@" "--gin.DATA_DIR='$data/summarize'"
}

counting() {
  local stage=$1
  shift
  waited "$SPEC_T5X" train-ngram --output "$output/$stage/ngram" "$@"
}

# The packaged models were made in exactly these steps.
run_stage() {
  local target=$output/target_more/model teacher=$output/summaries_target_more/model
  case $1 in
    target) training target train train_ende_target ;;
    target_more)
      training target_more train train_ende_target_more \
        "--gin.CHECKPOINT_PATH='$output/target/model'"
      ;;
    ngram)
      counting ngram --data "$data/ende/train.tsv.gz" --column 2 --num_columns 3 \
        --vocabulary "$target" --order 3 --min_count 3
      ;;
    draft)
      training draft distill train_ende_draft "--gin.CHECKPOINT_PATH='$output/target/model'"
      ;;
    draft_more)
      training draft_more distill distill_ende_draft "--gin.CHECKPOINT_PATH='$target'" \
        "--gin.INITIAL_DRAFT='$output/draft/draft'"
      ;;
    eagle) training eagle distill distill_ende_eagle "--gin.CHECKPOINT_PATH='$target'" ;;
    summaries_target)
      summaries summaries_target train train_summaries_target \
        "--gin.train.initial_checkpoint='$output/target/model'"
      ;;
    summaries_target_more)
      summaries summaries_target_more train train_summaries_target_more \
        "--gin.train.initial_checkpoint='$output/summaries_target/model'"
      ;;
    summaries_draft)
      summaries summaries_draft distill train_summaries_draft \
        "--gin.CHECKPOINT_PATH='$output/summaries_target/model'" \
        "--gin.distill.initial_checkpoint='$output/draft/draft'"
      ;;
    summaries_draft_more)
      summaries summaries_draft_more distill distill_summaries_draft \
        "--gin.CHECKPOINT_PATH='$teacher'" \
        "--gin.INITIAL_DRAFT='$output/summaries_draft/draft'"
      ;;
    summaries_ngram)
      counting summaries_ngram --data "$data/summarize/debian_train.tsv.gz" --column 1 \
        --num_columns 2 --vocabulary "$teacher" --order 3
      ;;
    summaries_eagle)
      summaries summaries_eagle distill distill_summaries_eagle "--gin.CHECKPOINT_PATH='$teacher'"
      ;;
  esac
}

run mkdir -p "$output"
for stage in "${stages[@]}"; do
  if [ -e "$output/$stage.done" ]; then
    say "stage $stage is done"
    continue
  fi
  say "stage $stage"
  run_stage "$stage"
  run touch "$output/$stage.done"
done
