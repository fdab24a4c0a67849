"""Beam search, plain and speculative, for any ``interfaces.NodeTarget``."""
