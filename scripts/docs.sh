#!/usr/bin/env bash
# Creates .venv, installs the package with its docs extra, builds the site in build/site:
# README, docs and the API from the docstrings. A dead link or any warning fails.
# Arguments go to mkdocs build; --dry-run first prints the commands, and --here takes the
# environment of PYTHON (python3).
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"

dry_run_flag "$@"
setup_env docs
# Silences a warning about MkDocs 2, which setup.py excludes.
export NO_MKDOCS_2_WARNING=1
run "$ENV_PYTHON" -m mkdocs build --strict "${REST[@]}"
say "the site is build/site/index.html"
