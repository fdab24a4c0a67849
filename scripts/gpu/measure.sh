#!/usr/bin/env bash
# Measures an accelerator: correctness, the paper's Table 2, batches of Flan-T5-XL's shape.
#   bash scripts/gpu/measure.sh [--dry-run] [--tiny] [--minutes N] OUTPUT [STAGE…]
#
#   OUTPUT       gets STAGE.json (of laws: JUnit's XML) and STAGE.log; the same command continues
#                with the stages that were not tried yet, then with those that failed or were
#                stopped, from the beginning: STAGE.part.old has what they had measured
#   STAGE        laws_sampling laws_loops laws_drafts laws_models pairs steps_small steps_base
#                steps_large table_2_small table_2_base table_2_large xl_plain xl_drafted xl_int8
#                xl_kv8 closed_8 closed_32 closed_64 and, on a GPU, flags (of XLA for GPUs) and,
#                of the kernels of contrib/gpu, laws_kernels pairs_by_kernels
#                table_2_small_by_kernels (all, in this order, flags first)
#   --minutes N  starts no stage after N minutes, stops the one that runs, and ends with status 75;
#                N is to be more than the longest stage takes
#   --tiny       every stage at small sizes, also on a CPU: a test of the script
#
# A stage that fails does not stop the others; the status is then 1. All models but the packaged
# ones have random weights; acceptances are simulated. PYTHON names the interpreter (default: that
# of .venv, or python3).
# Tested: the dry run, --tiny on a CPU, and four stages on an H200: steps_small took 35 seconds,
# xl_plain and xl_drafted together 165, laws_kernels 60; steps_large took 76 on an H100. Stages
# beside each other took several times as long. Not tested: the other stages, and how laws share
# compiled programs and end.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/../setup_env.sh"
help_flag "$@"
minutes=100000 tiny="" output="" chosen=()
STAGES=(laws_sampling laws_loops laws_drafts laws_models pairs steps_{small,base,large}
  table_2_{small,base,large} xl_{plain,drafted,int8,kv8} closed_8 closed_32 closed_64)
[ "${ACCELERATOR:-}" = tpu ] ||
  STAGES=(flags "${STAGES[@]}" laws_kernels {pairs,table_2_small}_by_kernels)
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
FOR_LAWS="pytest beartype hypothesis pytest-xdist 'jaxtyping>=0.3.6'"
go_to_repository
# XLA computes the stages without a suffix.
export SPEC_T5X_GPU_KERNELS=${SPEC_T5X_GPU_KERNELS:-0}
python=$(environment)
deadline=$((SECONDS + 60 * 10#$minutes))
if [ -z "$tiny" ]; then
  export JAX_PLATFORMS=${JAX_PLATFORMS:-${ACCELERATOR:-cuda},cpu}
  need_accelerator "$python"
fi
if [[ " ${chosen[*]}" == *" laws_"* && -z "${DRY_RUN:-}" ]]; then
  "$python" -c 'import pytest, beartype' 2>/dev/null ||
    die "no pytest or beartype for laws: $python -m pip install $FOR_LAWS, or name other stages"
  "$python" -c 'import hypothesis' 2>/dev/null ||
    say "no hypothesis: files of tests that import it fail; $python -m pip install $FOR_LAWS"
  # One process computes on a TPU.
  [ "${ACCELERATOR:-}" = tpu ] || "$python" -c 'import xdist' 2>/dev/null ||
    say "no xdist: laws take one process in place of eight; $python -m pip install $FOR_LAWS"
fi
run mkdir -p "$output"
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}

signal=TERM
within() { # COMMAND: stops it by the signal when the minutes are over, with status 124
  local left=$((deadline - SECONDS)) status=0
  [ $left -gt 0 ] || return 124
  run timeout --signal=$signal --kill-after=30 "$left" "$@" || status=$?
  # A program that is not stopped is killed.
  [ $status != 137 ] || [ $SECONDS -lt $deadline ] || status=124
  return $status
}
keep() { if [ -n "${DRY_RUN:-}" ]; then cat; else tee -a "$part"; fi; } # standard input
# Both ways to compute layers on a GPU, XLA's on a TPU.
decoding() {
  [ "${ACCELERATOR:-}" != tpu ] || set -- "$@" --by XLA
  within "$python" -m benchmarks.decoding "$@" --json "$part"
}

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

# The tests of verifiers, loops, drafts and networks, on the accelerator in float32; on a GPU in
# eight processes if pytest can, which share compiled programs. Interrupted, pytest writes its
# results so far.
laws() { # FOLDER
  local tests=("tests/$1") several=() signal=INT
  [ -z "$tiny" ] || tests=("tests/sampling/test_verification.py")
  [ "$1" != kernels ] || tests=("tests/contrib/gpu${tiny:+/test_products.py}")
  if [ -z "$tiny" ] && [ "${ACCELERATOR:-}" != tpu ] &&
    "$python" -c 'import xdist' 2>/dev/null; then
    several=(--numprocesses 8 --dist worksteal)
    local -x XLA_PYTHON_CLIENT_MEM_FRACTION=.08
  fi
  JAX_DEFAULT_MATMUL_PRECISION=highest within "$python" -m pytest "${tests[@]}" -q --tb=short \
    "${several[@]}" --override-ini usefixtures=kept_programs \
    --continue-on-collection-errors -p no:cacheprovider --junitxml "$part"
}

# The packaged T5 on example texts of its three tasks: the same texts as plain decoding, or, in
# bfloat16, the margin where not.
pairs() {
  local draft run texts found status=0 differ="" number=16 length=64
  local runs=("float32 1" "bfloat16 1")
  # One row one by one, and several in tiles.
  [ "$SPEC_T5X_GPU_KERNELS" = 0 ] || runs=("bfloat16 1" "bfloat16 8")
  [ -z "$tiny" ] || number=1 length=8
  mapfile -t texts < <("$python" -c "
from spec_t5x.data.task_options import SUMMARIZE_PREFIX, TRANSLATE_PREFIX
from spec_t5x.labs.reproduction.example_texts import DESCRIPTIONS, SENTENCES
for prefix, texts in (
    (TRANSLATE_PREFIX, SENTENCES), ('correct: ', SENTENCES), (SUMMARIZE_PREFIX, DESCRIPTIONS)
):
    print(*(prefix + text for text in texts[:$number]), sep='\n')")
  for draft in transformer copy; do
    for run in "${runs[@]}"; do
      found=$(within "$python" -m spec_t5x.cli.main generate -q --json --compare \
        --target t5-target --draft $draft --gamma 4 --dtype "${run% *}" \
        --batch_size "${run#* }" --truncate --max_decode_len $length "${texts[@]}") || status=$?
      [ -z "$found" ] || keep <<< "$found"
      [ $status = 0 ] || return $status
      [[ $run != float32* || $found != *'"identical": false'* ]] || differ+=" $draft"
    done
  done
  [ -z "$differ" ] || {
    echo "texts in float32 are not those of plain decoding, with the drafts$differ" >&2
    return 1
  }
}

# A step of a draft, with the profile of its kernels.
steps() { # SIZE
  local size=$1 batches=(1 8) flags=()
  [ -z "$tiny" ] || size=small batches=(1) flags=(--source_len 8 --max_decode_len 4 --repeats 1)
  decoding --target "t5_1_1_$size" --gamma 0 --batch "${batches[@]}" --profile "${flags[@]}"
}

table_2() { # DRAFT
  local size=xxl length=128 source=512
  [ -z "$tiny" ] || size=small length=8 source=8
  within "$python" -m spec_t5x.cli.main benchmark -q --target "random:t5_1_1_$size" --table_2 \
    --draft "random:t5_1_1_$1" --source_len $source --max_decode_len $length --repeats 5 \
    --json "$part"
}

# Flan-T5-XL's shape, sources of 400 and outputs of 128 tokens.
xl() { # BATCHES FLAGS…
  local size=xl batches flags=(--source_len 400 --max_decode_len 128 --repeats 3 --profile)
  read -ra batches <<< "$1"
  shift
  [ -z "$tiny" ] || size=small batches=(2) flags=(--source_len 8 --max_decode_len 4 --repeats 1)
  decoding --target "t5_1_1_$size" --batch "${batches[@]}" "${flags[@]}" "$@"
}

# 1,024 requests of that shape, from so many clients: each sends its next when it has its answer.
closed() { # CLIENTS
  local clients=$1 size=xl length=128 source=400 requests=1024
  [ -z "$tiny" ] || size=small clients=2 length=8 source=8 requests=4
  within "$python" -m benchmarks.closed_loop --target "random:t5_1_1_$size" \
    --requests "$requests" --concurrency "$clients" --source_len $source \
    --max_decode_len $length --json "$part"
}

measure() { # STAGE
  case $1 in
    *_by_kernels) SPEC_T5X_GPU_KERNELS=1 measure "${1%_by_kernels}" ;;
    steps_*) steps "${1#steps_}" ;;
    table_2_*) table_2 "${1#table_2_}" ;;
    xl_plain) xl "32 64 128" --gamma 0 ;;
    xl_drafted) xl 8 --gamma 0 4 --most_inner 5120 ;;
    xl_int8) xl "1 32 128" --gamma 0 --weights int8 ;;
    xl_kv8) xl "1 32 128" --gamma 0 --kv int8 ;;
    closed_*) closed "${1#closed_}" ;;
    laws_*) laws "${1#laws_}" ;;
    *) "$1" ;;
  esac
}

# Stages that were tried come last, the latest of them at the very end, so that none keeps another
# from running.
waiting=() tried=()
for stage in "${chosen[@]}"; do
  if [ -e "$output/$stage.json" ]; then
    say "stage $stage is done"
  elif [ -e "$output/$stage.log" ]; then
    tried+=("$stage.log")
  else
    waiting+=("$stage")
  fi
done
if [ ${#tried[@]} -gt 0 ]; then
  # shellcheck disable=SC2012 # names of stages
  mapfile -t tried < <(cd "$output" && ls -tr "${tried[@]}")
  waiting+=("${tried[@]%.log}")
fi
failed=()
for stage in "${waiting[@]}"; do
  part=$output/$stage.part log=$output/$stage.log status=0
  [ ! -e "$output/$stage.json" ] || continue
  if [ -n "${DRY_RUN:-}" ]; then
    say "stage $stage"
    measure "$stage"
    continue
  elif [ $SECONDS -ge $deadline ]; then
    say "$minutes minutes are over: the same command continues with $stage"
    exit 75
  fi
  say "stage $stage"
  [ ! -e "$part" ] || mv --backup=numbered "$part" "$part.old"
  start=$SECONDS
  measure "$stage" > "$log" 2>&1 || status=$?
  say "stage $stage took $((SECONDS - start)) seconds"
  if [ $status = 124 ] && [ "$stage" = "${waiting[0]}" ]; then
    say "stage $stage takes longer than $minutes minutes: give more"
    exit 75
  elif [ $status = 124 ]; then
    # Without a log it is as one that was not tried: it comes first, and has all minutes.
    mv --backup=numbered "$log" "$log.old"
    say "$minutes minutes are over: the same command continues with $stage"
    exit 75
  elif [ $status != 0 ]; then
    failed+=("$stage")
    say "stage $stage failed: $(tail -n 1 "$log")"
  else
    mv "$part" "$output/$stage.json"
  fi
done
[ ${#failed[@]} = 0 ]
