"""Medusa: heads on the target's last state that look several tokens ahead."""

from spec_t5x.registry import register

register("draft", medusa="spec_t5x.contrib.medusa.draft:KIND")
register("training", **{"train-heads": "spec_t5x.contrib.medusa.training:train_heads"})
