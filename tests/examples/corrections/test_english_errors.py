"""Errors in English: each kind by an example, and the texts that stay as they are."""

import random

import pytest
from english_errors import KINDS, MISSPELLING, corrupt, pairs

from spec_t5x.errors import InputError

TEXT = "She has told them about the two children, but they're at the office with their friends."


def variants(text, *kinds):
    return {corrupt(text, random.Random(seed), rate=1.0, kinds=kinds) for seed in range(200)}


@pytest.mark.parametrize(
    ("kind", "text", "errors"),
    [
        ("drop", "thing", {"thng", "ting", "hing", "thig", "thin"}),
        ("swap", "thing", {"hting", "tihng", "thnig", "thign"}),
        ("beside", "seal", {"zeal", "sral", "seql", "seak"}),
        ("ear", "receive", {"recieve", "resceive", "raceive", "reseive"}),
        ("join", "a lot of", {"alotof", "alot of", "a lotof"}),
        ("split", "about", {"ab out", "abo ut"}),
        ("repeat", "to the", {"to to the the"}),
        ("case", "I met Ann", {"i met ann"}),
        ("punctuation", "Come, Ann.", {"Come Ann", "Come Ann ."}),
        ("apostrophe", "it's Ann's", {"its Anns"}),
        ("article", "He saw a dog", {"He saw dog", "He saw the dog", "He saw an dog"}),
        ("preposition", "wait for us", {"wait us", "wait to us", "wait in us"}),
        ("agreement", "he is here", {"he are here"}),
        ("agreement", "These were", {"This was"}),
        ("number", "two boxes", {"two box"}),
        ("number", "she tries this dish", {"she try this dishes"}),
        ("form", "can go", {"can went", "can gone", "can going"}),
        ("form", "to listen", {"to listening", "to listened"}),
        ("confusion", "Their hole", {"There whole", "They're whole"}),
        ("leave_out", "it is late", {"late"}),
    ],
)
def test_each_kind_makes_the_errors_that_its_name_says(kind, text, errors):
    found = variants(text, kind)
    if kind in (*MISSPELLING, "form", "preposition", "article", "join", "punctuation"):
        assert found & errors
    else:
        assert errors <= found
    assert all(len(error.split()) <= 2 * len(text.split()) for error in found)


def test_every_kind_is_made_in_an_ordinary_sentence_or_one_of_two():
    for kind in KINDS:
        found = variants(TEXT, kind) | variants("To go home, Ann is trying it.", kind)
        assert len(found) > 1, kind
    # Capitals and punctuation around a word stay.
    assert variants('"Their," he', "confusion") >= {'"There," him', '"They\'re," him'}
    for text in ("%s: --help", "/usr/bin/x11", "x=3;", "foo_bar", "100 %", "", "日本語", "e.g."):
        assert variants(text, *KINDS) == {text}


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_about_as_many_words_are_misspelt_as_the_rate_says(rate):
    words = ["because", "remember", "different", "tomorrow", "important", "several"] * 1000
    given = {"rate": rate, "kinds": MISSPELLING}
    found = corrupt(" ".join(words), random.Random(0), **given).split()
    wrong = sum(old != new for old, new in zip(words, found, strict=True))
    assert abs(wrong / len(words) - rate) < 0.02


def test_a_text_has_the_same_errors_in_any_company():
    texts = [TEXT, "He was here.", "I know that."]
    alone = [pair for text in texts for pair in pairs([text], seed=3, copies=2)]
    assert list(pairs(texts, seed=3, copies=2)) == alone
    assert list(pairs([*texts, TEXT], seed=3, copies=2)) == alone
    assert list(pairs(texts, seed=4, copies=2)) != alone


def test_some_texts_are_right_as_they_are():
    texts = [f"{TEXT} {number}" for number in range(400)]
    right, at_a_rate, always = (
        sum(source == target for source, target in pairs(texts, **given))
        for given in ({"right": 0.3}, {"rate": 0.02, "right": 0.0}, {"right": 1.0})
    )
    # At a rate, a text may happen to get none.
    assert 90 < right < 150 < at_a_rate < always == 400


def test_mistakes_are_reported_in_a_line():
    with pytest.raises(InputError, match="rate is 1.5: give the share"):
        corrupt(TEXT, random.Random(0), rate=1.5)
    for given, message in (
        ({"kinds": ["typo"]}, "kinds are typo: use some of drop"),
        ({"right": -1.0}, "right is -1.0: give the share"),
    ):
        with pytest.raises(InputError, match=message):
            list(pairs([TEXT], **given))
