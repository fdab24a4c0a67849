#!/usr/bin/env bash
# Installs the package in environments of its users, lists the packages that pip replaced, and runs
# the demo, all notebooks and the tests of decoding. Prints a table with a row per environment.
#   bash scripts/matrix.sh [--dry-run] [--to DIR] [--steps STEP,STEP] [ENVIRONMENT…]
#
#   ENVIRONMENT  colab-gpu colab-tpu lowest jax-0.10 newest-3.12 newest-3.13 (all of them)
#   STEP         demo notebooks tests (all of them), after the installation
#   --to DIR     environments and logs (build/matrix)
#   COLAB_LISTS  a folder with pip-freeze-gpu.txt and pip-freeze-tpu.txt, what Colab's runtimes have
#                installed (../shared/colab). What this package can meet of them is installed, for
#                the CPU
#
# Needs python3.11, python3.12 and python3.13. Takes hours, so it is not part of the test suite.
# Exit status 1 if a step failed, or pip replaced a package of Colab's.

# shellcheck disable=SC2329  # "timed" calls functions by their names
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

ENVIRONMENTS=(colab-gpu colab-tpu lowest jax-0.10 newest-3.12 newest-3.13)
STEPS=(demo notebooks tests)
TESTS=(tests/sampling tests/loops tests/drafts tests/models tests/checkpoints
  tests/machine/test_compilation_cache.py tests/generation tests/test_options.py)
# Tests without PyTorch, whose wheel for every Python is one for CUDA.
TEST_TOOLS=('pytest>=8.4' 'hypothesis>=6.130,<7' 'beartype>=0.22,<1' 'scipy>=1.14,<2'
  'jaxtyping>=0.3.6,<0.4')
# Of Colab's packages, those that this one, an extra or a notebook can meet.
MET=(absl-py beartype chex etils filelock fsspec gin-config gradio grain huggingface_hub ipykernel
  ipython ipywidgets jax jaxlib flax Jinja2 libtpu matplotlib ml_dtypes nbclient nbformat nltk numpy
  optax orbax-checkpoint packaging pandas pip protobuf psutil pytest rich safetensors scikit-learn
  scipy sentencepiece setuptools tabulate tensorboard tensorflow tensorflow-datasets
  tensorflow-text tensorstore tokenizers transformers typer wheel)

to=build/matrix lists=${COLAB_LISTS:-../shared/colab}
chosen=() steps=("${STEPS[@]}")
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) DRY_RUN=1 ;;
    --to | --steps)
      [ -n "${2:-}" ] || die "$1 is '${2:-}': give a value after it"
      if [ "$1" = --to ]; then to=$2; else IFS=, read -ra steps <<< "$2"; fi
      shift
      ;;
    *)
      [[ " ${ENVIRONMENTS[*]} " == *" $1 "* ]] ||
        die "no environment '$1': choose of ${ENVIRONMENTS[*]}"
      chosen+=("$1")
      ;;
  esac
  shift
done
for step in "${steps[@]}"; do
  [[ " ${STEPS[*]} " == *" $step "* ]] || die "no step '$step': choose of ${STEPS[*]}"
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${ENVIRONMENTS[@]}")
to=$(realpath -m "$to") lists=$(realpath -m "$lists")
for name in "${chosen[@]}"; do
  list=$lists/pip-freeze-${name#colab-}.txt
  [[ $name != colab-* || -f $list ]] || die "no file $list: name its folder in COLAB_LISTS"
done
go_to_repository

# Creates an environment with the packages that are installed before this one.
prepare() {
  local name=$1 python=python3.${1##*3.}
  case $name in
    colab-*) python=python3.13 ;;
    lowest | jax-0.10) python=python3.11 ;;
  esac
  rm -rf "$place/env"
  "$python" -m venv "$place/env"
  case $name in
    colab-*)
      # Ignores case, as pip does.
      local -a met
      mapfile -t met < <(grep -i -x -E "($(IFS='|'; echo "${MET[*]}"))==.*" "$list")
      pip_install -c "$list" "${met[@]}"
      ;;
    lowest)
      # The oldest series that setup.py allows: ==0.6.* for >=0.6.
      local series='s/^ *"([A-Za-z_-]+)>=([0-9.]+).*/\1==\2.*/p'
      local -a oldest
      mapfile -t oldest < <(sed -n '/install_requires/,/\]/p' setup.py | sed -nE "$series")
      pip_install "${oldest[@]}"
      ;;
    jax-0.10) pip_install 'jax>=0.10,<0.11' ;;
  esac
}

pip_install() { "$place/env/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

installed() {
  "$place/env/bin/python" -m pip list --format=freeze --disable-pip-version-check 2>/dev/null | sort
}

version_of() { installed | sed -n "s/^$1==//p"; }

install_package() {
  installed > "$place/before.txt"
  pip_install "$place/copy"
  installed > "$place/after.txt"
  comm -23 "$place/before.txt" "$place/after.txt" > "$place/replaced.txt"
}

step_demo() {
  (cd "$place" && env/bin/spec-t5x generate --compare --gamma 3 "Where is the station?" &&
    env/bin/spec-t5x doctor --try)
}

# Installs more packages; for Colab without changing a version that is installed.
more_packages() {
  case $name in
    colab-*) pip_install -c "$place/after.txt" "$@" ;;
    *) pip_install "$@" ;;
  esac
}

step_notebooks() {
  [[ $name == colab-* ]] || pip_install "$place/copy[notebooks]"
  (cd "$place/copy" && ../env/bin/python scripts/run_notebooks.py --to "$place/notebooks")
}

step_tests() {
  more_packages "${TEST_TOOLS[@]}" "$place/copy[eval]"
  (cd "$place/copy" && ../env/bin/python -m pytest -q -p no:cacheprovider "${TESTS[@]}")
}

# timed LOG COMMAND: sets "took" to the seconds of COMMAND, which ends at its first error, and
# "status". Bash ignores errors in what "if", "||" and "&&" call, so these call neither this nor cell.
timed() {
  local log=$1 start=$SECONDS
  shift
  set +e
  (set -e; "$@") > "$log" 2>&1
  status=$?
  set -e
  took=$((SECONDS - start))
}

# Prints the cell of a step: the result (for tests, the counts of their last line) and the time.
cell() {
  local step=$1 result=ok
  timed "$place/$step.log" "step_$step"
  [ "$status" = 0 ] || result="failed, see $place/$step.log"
  if [ "$step" = tests ] && summary=$(tail -n 1 "$place/tests.log" | grep ' in '); then
    result=${summary% in *}
  fi
  printf '%s, %s s' "$result" "$took"
}

worst=0
printf '| %s ' environment 'Python, JAX, flax' installed 'replaced by pip' "${steps[@]}"
printf '|\n|---|---|---|---%s|\n' "$(printf -- '|---%.0s' "${steps[@]}")"
for name in "${chosen[@]}"; do
  place=$to/$name list=$lists/pip-freeze-${name#colab-}.txt
  if [ -n "${DRY_RUN:-}" ]; then
    echo "| $name | | | | ${steps[*]} |"
    continue
  fi
  rm -rf "$place/copy"
  mkdir -p "$place/copy"
  git ls-files -z | xargs -0 cp --parents -t "$place/copy"
  timed "$place/prepare.log" prepare "$name"
  if [ "$status" = 0 ]; then
    timed "$place/install.log" install_package
  fi
  if [ "$status" != 0 ]; then
    echo "| $name | | failed, see $place/*.log | |"
    worst=1
    continue
  fi
  replaced=$(paste -s -d ' ' "$place/replaced.txt")
  [[ $name != colab-* || -z $replaced ]] || worst=1
  python=$("$place/env/bin/python" -c 'import platform; print(platform.python_version())')
  printf '| %s | %s, %s, %s | %s s | %s |' "$name" "$python" "$(version_of jax)" \
    "$(version_of flax)" "$took" "${replaced:-nothing}"
  for step in "${steps[@]}"; do
    printf ' '
    cell "$step"
    [ "$status" = 0 ] || worst=1
    printf ' |'
  done
  printf '\n'
done
exit "$worst"
