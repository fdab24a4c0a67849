"""Checkpoints of T5X."""
