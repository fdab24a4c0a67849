#!/usr/bin/env bash
# Measures an accelerator: correctness, the paper's Table 2, batches of Flan-T5-XL's shape.
#   bash scripts/gpu/measure.sh [--dry-run] [--tiny] [--minutes N] OUTPUT [STAGE…]
#
#   OUTPUT       gets STAGE.json (of laws: JUnit's XML) and STAGE.log; the same command continues
#                with the stages that have none yet
#   STAGE        flags laws_sampling laws_loops laws_drafts laws_models pairs table_2 xl_1 xl_8
#                xl_32 xl_64 xl_128 xl_int8_1 xl_int8_32 xl_int8_128 xl_kv8_1 xl_kv8_32
#                xl_kv8_128 closed_8 closed_32 closed_64 and, of the kernels of contrib/gpu,
#                laws_kernels kernels_small kernels_xxl and STAGE_by_kernels for pairs table_2
#                xl_1 xl_8 xl_32 (all of them, in this order)
#   --minutes N  starts no stage after N minutes, stops the one that runs, and ends with status 75
#   --tiny       every stage at small sizes, also on a CPU: a test of the script
#
# A stage that fails does not stop the others; the status is then 1. All models but the packaged
# ones have random weights; acceptances are simulated. PYTHON names the interpreter (python3).
# Tested: the dry run, and --tiny on a CPU. Not tested: an accelerator.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
help_flag "$@"
minutes=100000 tiny="" output="" chosen=()
STAGES=(flags laws_sampling laws_loops laws_drafts laws_models pairs table_2 xl_1 xl_8 xl_32 xl_64
  xl_128 xl_int8_1 xl_int8_32 xl_int8_128 xl_kv8_1 xl_kv8_32 xl_kv8_128
  closed_8 closed_32 closed_64)
[ "${ACCELERATOR:-}" = tpu ] || STAGES+=(laws_kernels kernels_small kernels_xxl
  {pairs,table_2,xl_1,xl_8,xl_32}_by_kernels)
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) DRY_RUN=1 ;;
    --tiny) tiny=1 ;;
    --minutes)
      minutes=${2:-}
      [[ $minutes =~ ^[0-9]+$ ]] || die "--minutes is '$minutes': give a whole number"
      shift
      ;;
    -*) die "unknown argument '$1': see --help" ;;
    *)
      if [ -z "$output" ]; then
        output=$(realpath -m "$1")
      else
        [[ " ${STAGES[*]} " == *" $1 "* ]] || die "no stage '$1': choose of ${STAGES[*]}"
        chosen+=("$1")
      fi
      ;;
  esac
  shift
done
[ -n "$output" ] || die "no output: give a folder for the results"
[ ${#chosen[@]} -gt 0 ] || chosen=("${STAGES[@]}")
go_to_repository
python=${PYTHON:-python3}
deadline=$((SECONDS + 60 * minutes))
if [ -z "$tiny" ]; then
  export JAX_PLATFORMS=${JAX_PLATFORMS:-${ACCELERATOR:-cuda},cpu}
  need_accelerator "$python"
fi
run mkdir -p "$output"
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}

within() { # COMMAND: stops it when the minutes are over
  local left=$((deadline - SECONDS))
  [ $left -gt 0 ] || return 124
  run timeout "$left" "$@"
}
keep() { if [ -n "${DRY_RUN:-}" ]; then cat; else tee "$part"; fi; } # standard input
benchmark() { within "$python" -m spec_t5x.cli.main benchmark -q "$@" --json "$part"; }

# Programs of large batches, with each flag that may make XLA's kernels fail or not.
flags() {
  local rows=1024 length=64 name status found=()
  [ -z "$tiny" ] || rows=2 length=4
  declare -A tried=(
    [none]="--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
    [no_autotuning]="--xla_gpu_autotune_level=0"
    [no_triton]="--xla_gpu_enable_triton_gemm=false"
    [no_command_buffers]="--xla_gpu_enable_command_buffer="
  )
  for name in "${!tried[@]}"; do
    status=0
    XLA_FLAGS=${tried[$name]} within "$python" -m spec_t5x.cli.main benchmark -q \
      --target random:t5_1_1_small --draft copy --alpha 0.5 --gamma 1 --temperature 0 \
      --batch_size "$rows" --source_len 32 --max_decode_len "$length" --repeats 1 || status=$?
    [ $status != 124 ] || return 124
    found+=("\"$name\": {\"flags\": \"${tried[$name]}\", \"status\": $status}")
  done
  (IFS=,; printf '{%s}\n' "${found[*]}") | keep
}

# The tests of verifiers, loops, drafts and networks, on the accelerator in float32.
laws() { # FOLDER
  local tests=("tests/$1")
  [ -z "$tiny" ] || tests=("tests/sampling/test_verification.py")
  [ "$1" != kernels ] || tests=("tests/contrib/gpu${tiny:+/test_kernels.py}")
  JAX_DEFAULT_MATMUL_PRECISION=highest within "$python" -m pytest "${tests[@]}" -q --tb=short \
    -p no:cacheprovider --junitxml "$part"
}

# The packaged T5 on example texts of its three tasks: the same texts as plain decoding, or the
# margin where not.
pairs() {
  local draft dtype texts number=16 length=64
  [ -z "$tiny" ] || number=1 length=8
  mapfile -t texts < <("$python" -c "
from spec_t5x.data.task_options import SUMMARIZE_PREFIX, TRANSLATE_PREFIX
from spec_t5x.labs.reproduction.example_texts import DESCRIPTIONS, SENTENCES
for prefix, texts in (
    (TRANSLATE_PREFIX, SENTENCES), ('correct: ', SENTENCES), (SUMMARIZE_PREFIX, DESCRIPTIONS)
):
    print(*(prefix + text for text in texts[:$number]), sep='\n')")
  for draft in transformer copy; do
    for dtype in float32 bfloat16; do
      within "$python" -m spec_t5x.cli.main generate -q --json --compare --target t5-target \
        --draft $draft --gamma 4 --dtype $dtype --truncate --max_decode_len $length \
        "${texts[@]}" || return
    done
  done | keep
}

table_2() {
  local size=xxl length=128 source=512 drafts=(small base large)
  [ -z "$tiny" ] || size=small length=8 source=8 drafts=(small)
  benchmark --target "random:t5_1_1_$size" --table_2 --source_len $source \
    --max_decode_len $length --repeats 5 "${drafts[@]/#/--draft=random:t5_1_1_}"
}

# Flan-T5-XL's shape, sources of 400 and outputs of 128 tokens.
xl() { # ROWS FLAGS…
  local rows=$1 size=xl length=128 source=400
  shift
  [ -z "$tiny" ] || size=small rows=2 length=8 source=8
  benchmark --target "random:t5_1_1_$size" --draft random:t5_1_1_small --alpha 0.75 \
    --gamma 4 --gamma 7 --temperature 0 --batch_size "$rows" --source_len $source \
    --max_decode_len $length --repeats 3 "$@"
}

# 1,024 requests of that shape, from so many clients: each sends its next when it has its answer.
closed() { # CLIENTS
  local clients=$1 size=xl length=128 source=400 requests=1024
  [ -z "$tiny" ] || size=small clients=2 length=8 source=8 requests=4
  within "$python" -m benchmarks.closed_loop --target "random:t5_1_1_$size" \
    --requests "$requests" --concurrency "$clients" --source_len $source \
    --max_decode_len $length --json "$part"
}

# The blocks of a decoder layer by XLA and by the kernels of contrib/gpu.
kernels() { # SIZE
  local flags=()
  [ -z "$tiny" ] || flags=(--source_len 8 --max_decode_len 16 --steps 1 --repeats 1)
  within "$python" -m benchmarks.gpu_blocks --size "t5_1_1_$1" "${flags[@]}" --json "$part"
}

measure() { # STAGE
  case $1 in
    *_by_kernels) SPEC_T5X_GPU_KERNELS=1 measure "${1%_by_kernels}" ;;
    kernels_*) kernels "${1#kernels_}" ;;
    xl_int8_*) xl "${1#xl_int8_}" "--gin.Models.weights='int8'" ;;
    xl_kv8_*) xl "${1#xl_kv8_}" "--gin.Models.kv='int8'" ;;
    xl_*) xl "${1#xl_}" ;;
    closed_*) closed "${1#closed_}" ;;
    laws_*) laws "${1#laws_}" ;;
    *) "$1" ;;
  esac
}

failed=()
for stage in "${chosen[@]}"; do
  if [ -e "$output/$stage.json" ]; then
    say "stage $stage is done"
    continue
  fi
  say "stage $stage"
  part=$output/$stage.part status=0
  if [ -n "${DRY_RUN:-}" ]; then
    measure "$stage"
    continue
  fi
  measure "$stage" > "$output/$stage.log" 2>&1 || status=$?
  if [ $status = 124 ]; then
    say "$minutes minutes are over: the same command continues with $stage"
    exit 75
  elif [ $status != 0 ]; then
    failed+=("$stage")
    say "stage $stage failed: $(tail -n 1 "$output/$stage.log")"
  else
    mv "$part" "$output/$stage.json"
  fi
done
[ ${#failed[@]} = 0 ]
