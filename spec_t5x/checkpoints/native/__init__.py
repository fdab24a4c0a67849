"""The formats that this package writes: models, heads, shared drafts, n-gram tables."""
