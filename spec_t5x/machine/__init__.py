"""What depends on the computer: kernels, XLA's flags, what is kept of compiled programs."""
