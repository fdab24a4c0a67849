"""Lossless speculative decoding of encoder-decoder T5 models in JAX."""

__version__ = "0.1.0"
