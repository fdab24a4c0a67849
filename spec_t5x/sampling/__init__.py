"""From logits to a token, and whether a drafted token stands: arrays only, no model."""
