"""Compilation for TPUs that are not at hand: what fits, and how long a step takes."""
