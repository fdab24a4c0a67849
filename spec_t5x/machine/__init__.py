"""The computer: its operations, XLA's flags, and the programs that are kept for it."""
