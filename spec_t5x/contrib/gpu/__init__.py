"""Kernels that replace XLA's operations when decoding on a GPU: see README.md in this folder."""

from spec_t5x.registry import register

register("operations", gpu="spec_t5x.contrib.gpu.operations:GPU")
