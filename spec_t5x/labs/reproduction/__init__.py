"""The paper's tables and figures, made again: ``spec-t5x reproduce``."""
