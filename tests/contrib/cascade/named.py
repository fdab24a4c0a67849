"""Cascades among ``tests.named_drafts``."""

CASES = ["cascade:{}/draft,bigram:{}/ngrams", "cascade:int4,{}/draft"]


def write(directory, target):
    """Its parts are others' drafts."""
