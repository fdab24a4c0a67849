"""Drafts: one family in each file, all of them subclasses of ``interfaces.Draft``."""
