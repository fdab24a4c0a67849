"""Cascades among ``tests.named_drafts``."""

CASES = ["cascade:{}/draft,bigram:{}/ngrams", "cascade:int4,{}/draft"]


def write(directory, target):
    """Writes nothing: the parts are others' drafts."""
