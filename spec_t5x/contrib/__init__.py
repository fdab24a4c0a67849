"""Optional parts: each folder registers itself with the core and may be deleted."""
