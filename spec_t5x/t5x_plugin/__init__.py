"""Speculative decoding inside T5X; nothing else in the package's core imports T5X."""
