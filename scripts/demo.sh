#!/usr/bin/env bash
# Creates .venv, installs the package and runs the main job on the packaged pair:
# English to German, speculative and plain, same text.
# Arguments go to spec-t5x generate: bash scripts/demo.sh "Where is the station?"
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"

setup_env ""
if [ $# -eq 0 ]; then
  set -- "Tom put the cups on the shelf." \
         "This package contains the development files." \
         "Where did you learn to speak English so well?"
fi
say "translating, speculatively and plainly"
exec .venv/bin/spec-t5x generate --compare "$@"
