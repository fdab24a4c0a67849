"""Medusa: draft heads that predict several tokens ahead from the target's decoder states."""

from spec_t5x.registry import register

register("draft", medusa="spec_t5x.contrib.medusa.draft:KIND")
register("training", **{"train-heads": "spec_t5x.contrib.medusa.training:train_heads"})
