"""The paper's closed forms, and estimates of acceptance with intervals."""
