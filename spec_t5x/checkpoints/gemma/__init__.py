"""T5Gemma as google-deepmind/gemma stores it."""
