"""Drafts: one family a file, all under ``interfaces.Draft``."""
