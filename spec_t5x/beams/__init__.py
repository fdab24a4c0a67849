"""Beam search, plain and speculative; Protocols only."""
