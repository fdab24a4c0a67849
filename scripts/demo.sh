#!/usr/bin/env bash
# Creates .venv, installs the package and runs the packaged models: English to German, and English
# with errors to English without, speculatively and plainly, with the same text.
# Arguments go to spec-t5x generate: bash scripts/demo.sh "Where is the station?"
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"

setup_env ""
say "translating, speculatively and plainly"
translated=("Tom put the cups on the shelf." "This package contains the development files."
  "Where did you learn to speak English so well?")
.venv/bin/spec-t5x generate --compare "${@:-${translated[@]}}"
say "correcting English: what is right is copied from the source"
corrected=("He dont know were the the station is, becuase he have never been their."
  "Please check weather the file exist before you tries to opne it agian."
  "I has lived here since three years and i like the peple which live in this city.")
exec .venv/bin/spec-t5x generate --target correct-target --compare "${@:-${corrected[@]}}"
