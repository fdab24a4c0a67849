#!/usr/bin/env bash
# On a machine with an H100 and JAX: trains one T5 for three tasks, and its drafts.
#   bash scripts/gpu/train_t5.sh [--dry-run] [--grow DIR] DATA OUTPUT [--gin.NAME=VALUE …]
#
#   DATA        holds translations.tsv.gz, corrections.tsv.gz and summaries.tsv.gz, each also with
#               dev_ before its name, and spiece.model
#   OUTPUT      gets target/model, draft/draft and eagle/draft; the same command resumes a training
#   --grow DIR  the target starts from the smaller T5 in DIR
#   --gin.…     for every training: options of all three, such as --gin.TrainOptions.seed=1
#
# PYTHON names the interpreter (.venv's, or python3). To carry the result away in small parts:
#   tar -cf - -C OUTPUT target/model draft/draft eagle/draft | split -b 15m - part.
#
# Tested: the dry run; and on an H100, each in a call of ten minutes, 5,457 steps of the target in
# seven and a half minutes and 2,000 of the draft in three. Not tested: all stages in one call.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
help_flag "$@"
growing=()
while :; do
  case ${1:-} in
    --dry-run) DRY_RUN=1 ;;
    --grow)
      [[ ${2:-} != "" && $2 != -* ]] || die "--grow is '${2:-}': give a model's directory after it"
      growing=("--gin.train.initial_checkpoint='$(realpath -m "$2")'" --gin.train.grow=True)
      shift
      ;;
    --help) help_flag --help ;;
    -*) die "unknown argument '$1': see --help; flags of gin come last" ;;
    *) break ;;
  esac
  shift
done
[ $# -ge 2 ] || die "$# arguments: give DATA and OUTPUT, see --help"
data=$(realpath -m "$1") output=$(realpath -m "$2")
shift 2
flags=("$@")
go_to_repository
python=$(environment)

# With JAX 0.11.2, autotuned programs of large batches ended with illegal instructions.
export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false \
--xla_gpu_enable_command_buffer= ${XLA_FLAGS:-}"
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$output/compiled}

mixed() { # FILE PREFIX TRANSLATIONS CORRECTIONS SUMMARIES FLAGS…
  local file=$output/$1 prefix=$data/$2 times=("$3" "$4" "$5")
  shift 5
  [ -e "$file" ] || run "$python" examples/prefixed_tasks.py --output "$file" "$@" \
    --task "translate English to German: " "${prefix}translations.tsv.gz" "${times[0]}" \
    --task "correct: " "${prefix}corrections.tsv.gz" "${times[1]}" \
    --task "summarize: " "${prefix}summaries.tsv.gz" "${times[2]}"
}

trained() { # COMMAND STAGE DATA FLAGS…
  local command=$1 stage=$2 texts=$3
  shift 3
  run "$python" -m spec_t5x.cli.main "$command" \
    "--gin_file=gin_configs/runs/${command}_t5_$stage.gin" \
    "--gin.DATA_DIR='$output/$texts'" "--gin.OUTPUT_DIR='$output/$stage'" \
    "$@" ${flags[@]+"${flags[@]}"}
}

mixed mixture/train.tsv.gz "" 2 1 2
mixed once/train.tsv.gz "" 1 1 1
for folder in mixture once; do mixed "$folder/dev.tsv.gz" dev_ 1 1 1 --first 500; done
trained train target mixture "--gin.VOCABULARY='$data/spiece.model'" ${growing[@]+"${growing[@]}"}
# The drafts share the GPU.
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.45
trained distill draft once "--gin.CHECKPOINT_PATH='$output/target/model'" &
draft=$! status=0
# Its gin file is for a CPU, on which small batches are as fast.
trained distill eagle once "--gin.CHECKPOINT_PATH='$output/target/model'" \
  --gin.DataOptions.tokens_per_batch=32768 --gin.TRAIN_STEPS=2600 \
  --gin.OptimizerOptions.learning_rate=2e-3 --gin.OptimizerOptions.cooldown_steps=1820 || status=$?
# Also if the head's training failed or ran out of time: a second run must not meet the first.
wait "$draft" || status=$?
exit "$status"
