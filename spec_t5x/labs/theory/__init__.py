"""The paper's closed forms."""
