"""The computer: its operations, XLA's flags, caches on its disk."""
