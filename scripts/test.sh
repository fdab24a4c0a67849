#!/usr/bin/env bash
# Creates .venv, installs the package with its test extra, runs the whole test suite.
# Arguments go to pytest: bash scripts/test.sh tests/test_decoding.py -x
set -euo pipefail
source "$(dirname "$0")/setup_env.sh"

setup_env test
say "running the tests"
exec .venv/bin/python -m pytest "$@"
