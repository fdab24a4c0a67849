"""Sampling: logits to tokens, rules of decoding, verification of drafts; arrays alone, no model."""
