"""Training of drafts, and measurements; decoding does not need this package."""
