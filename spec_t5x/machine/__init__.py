"""The computer: accelerators, operations, XLA's flags, caches and files on its disk."""
