#!/usr/bin/env bash
# Creates .venv, installs the package and runs the packaged T5, which translates and corrects
# English by T5's prefixes: speculatively and plainly, with the same output.
# Arguments go to spec-t5x generate in place of these texts; write the prefix in front of each text:
#   bash scripts/demo.sh "translate English to German: Where is the station?"
#   (or "correct: …", "summarize: …"). Paths are relative to the repository.
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "$0")/setup_env.sh"
help_flag "$@"

setup_env ""
compare() { .venv/bin/spec-t5x generate --compare "$@"; }
if [ $# -gt 0 ]; then
  say "decoding, speculatively and plainly"
  compare "$@"
else
  say "translating, speculatively and plainly"
  translated=("Tom put the cups on the shelf." "This package contains the development files."
    "Where did you learn to speak English so well?")
  compare "${translated[@]/#/translate English to German: }"
  say "correcting English, speculatively and plainly"
  corrected=("Tom said that he was going to by a new car as soon as he have enough money to pay for it."
    "We went to the market in the morning, bought some fresh bread and a bottle of milk, and walked \
home along the river becuase the wether was so nice."
    "I has lived here since three years and i like the peple which live in this city.")
  compare "${corrected[@]/#/correct: }"
fi
say "this model is small, and on a CPU arithmetic limits the verification of several tokens: larger
   models and accelerators gain more (README). Next: .venv/bin/spec-t5x doctor, or
   .venv/bin/python -m pip install '.[demo]' && .venv/bin/spec-t5x demo  (a page in the browser)"
