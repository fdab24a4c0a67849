"""The packaged pair for unconditional text."""

from tests.end_to_end import test_packaged_pairs


def test_same_text_in_fewer_calls(monkeypatch):
    pair = "lm-target", "lm-draft"
    texts = ["the file", "he was not", "this is", ""]
    monkeypatch.setitem(test_packaged_pairs.TEXTS, pair, texts)
    test_packaged_pairs.test_same_text_in_fewer_calls(*pair)
