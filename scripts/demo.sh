#!/usr/bin/env bash
# Creates .venv, installs the package and runs the packaged models, which translate English to
# German and correct English: speculatively and plainly, with the same output.
# Arguments go to spec-t5x generate: bash scripts/demo.sh "Where is the station?"
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

setup_env ""
say "translating, speculatively and plainly"
translated=("Tom put the cups on the shelf." "This package contains the development files."
  "Where did you learn to speak English so well?")
.venv/bin/spec-t5x generate --compare --gamma 3 "${@:-${translated[@]}}"
say "correcting English: the draft copies unchanged words from the source"
corrected=("Tom said that he was going to by a new car as soon as he have enough money to pay for it."
  "We went to the market in the morning, bought some fresh bread and a bottle of milk, and walked \
home along the river becuase the wether was so nice."
  "I has lived here since three years and i like the peple which live in this city.")
.venv/bin/spec-t5x generate --target correct-target --compare --gamma 12 "${@:-${corrected[@]}}"
say "these models are small; larger ones gain more (README). Next: .venv/bin/spec-t5x doctor, or
   .venv/bin/python -m pip install '.[demo]' && .venv/bin/spec-t5x demo  (a page in the browser)"
