"""Measurements: comparisons, benchmarks, and what the paper's tables need."""
