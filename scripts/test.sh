#!/usr/bin/env bash
# Creates .venv, installs the package with its test extra, runs the whole test suite.
# Where there is no Chromium, Debian's is installed too: a test opens the report in it.
# Arguments go to pytest: bash scripts/test.sh tests/loops -x
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

# At the same time; what it says of a failure, the test that needs it says again.
install_browser &
browser=$!
setup_env test
wait "$browser" || true
# A file's tests share models and compiled programs, and so stay in one process. In the
# order of their names: xdist would leave the packaged pair, few tests but long, for last.
workers=$(.venv/bin/python -c 'import os; print(min(os.cpu_count() or 1, 4))')
say "running the tests in $workers processes"
exec .venv/bin/python -m pytest --numprocesses "$workers" --dist loadfile \
  --no-loadscope-reorder "$@"
