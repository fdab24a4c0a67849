"""Compilation for TPUs on a machine without one: memory that loops need, times of steps."""
