"""Algorithm 1 and its plain twin: many rows until all have ended; Protocols only."""
