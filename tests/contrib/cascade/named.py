"""Cases of cascades for ``tests.named_drafts``."""

CASES = ["cascade:{}/draft,bigram:{}/ngrams", "cascade:int4,{}/draft"]


def write(directory, target):
    """Writes no files, because a cascade consists of other drafts."""
