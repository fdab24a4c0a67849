#!/usr/bin/env bash
# Creates .venv, installs the package with its test extra, runs the tests of the default lane.
#   bash scripts/test.sh                  the default lane
#   bash scripts/test.sh --changed        and the parts of the second lane whose files changed
#   bash scripts/test.sh --all            all tests
#   bash scripts/test.sh tests/loops -x   pytest's arguments: these tests alone
# scripts/lanes.py has the parts of the second lane. If there is no Chromium, Debian's is installed.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

# In the background; if it fails, tests that need the browser fail.
install_browser &
browser=$!
setup_env test
wait "$browser" || true
left_out=()
case ${1:-} in
  --all) shift ;;
  --changed) shift && mapfile -t left_out < <(.venv/bin/python scripts/lanes.py --changed) ;;
  tests*) ;;
  *) mapfile -t left_out < <(.venv/bin/python scripts/lanes.py) ;;
esac
# Tests of one file share models and compiled programs, so they run in one process. Files run in
# the order of their names: xdist would start the slow tests of the packaged pair last.
workers=$(.venv/bin/python -c 'import os; print(min(os.cpu_count() or 1, 4))')
say "running the tests in $workers processes"
exec .venv/bin/python -m pytest --numprocesses "$workers" --dist loadfile \
  --no-loadscope-reorder "${left_out[@]}" "$@"
