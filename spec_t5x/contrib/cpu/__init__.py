"""Kernels that replace XLA's operations when decoding on a CPU: see README.md in this folder."""

from spec_t5x.registry import register

register("operations", cpu="spec_t5x.contrib.cpu.operations:CPU")
