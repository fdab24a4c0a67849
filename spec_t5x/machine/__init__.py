"""What depends on the computer: its operations, XLA's flags, what is kept of compiled programs."""
