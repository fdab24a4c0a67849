"""Kernels for decoding on a CPU, in place of XLA's operations: see README.md beside this file."""

from spec_t5x.registry import register

register("operations", cpu="spec_t5x.contrib.cpu.operations:CPU")
