#!/usr/bin/env bash
# Runs the core's tests on a copy of the package without spec_t5x/contrib.
# Arguments go to pytest: bash scripts/core_tests.sh -x
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

setup_env test
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
.venv/bin/python -m tests.core_copy "$copy"
repository=$PWD
cd "$copy"
# Tests of documents, examples and benchmarks need the whole repository.
PYTHONPATH=$copy "$repository"/.venv/bin/python -m pytest tests \
  --ignore=tests/documents --ignore=tests/examples --ignore=tests/benchmarks \
  --ignore=tests/test_removal.py "$@"
