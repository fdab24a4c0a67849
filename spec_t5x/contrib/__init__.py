"""What hangs on the core's seams: each folder may be deleted, and registers itself."""
