"""Errors in English: each kind by an example, and what stays as it is."""

import random

import pytest
from english_errors import KINDS, MISSPELLING, corrupt, pairs

from spec_t5x.errors import InputError

TEXT = "She has told them about the two children, but they're at the office with their friends."


def variants(text, *kinds, rate=1.0, number=200):
    return {corrupt(text, random.Random(seed), rate=rate, kinds=kinds) for seed in range(number)}


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


@pytest.mark.parametrize(
    "text", ["%s: --help", "/usr/bin/x11", "x=3;", "foo_bar", "100 %", "", "日本語", "e.g."]
)
def test_what_is_no_word_stays(text):
    assert variants(text, *KINDS) == {text}


def test_capitals_and_punctuation_around_a_word_stay():
    assert variants('"Their," he', "confusion") >= {'"There," him', '"They\'re," him'}


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_about_as_many_words_are_misspelt_as_the_rate_says(rate):
    words = [*(["because", "remember", "different", "tomorrow", "important", "several"])] * 50
    text = " ".join(words)
    wrong = sum(
        old != new
        for seed in range(20)
        for old, new in zip(
            words,
            corrupt(text, random.Random(seed), rate=rate, kinds=MISSPELLING).split(),
            strict=True,
        )
    )
    assert abs(wrong / 6000 - rate) < 0.02


def test_a_text_has_the_same_errors_whatever_is_beside_it():
    texts = [TEXT, "He was here.", "I know that."]
    alone = [pair for text in texts for pair in pairs([text], seed=3, copies=2)]
    assert list(pairs(texts, seed=3, copies=2)) == alone
    assert list(pairs([*texts, TEXT], seed=3, copies=2)) == alone
    assert list(pairs(texts, seed=4, copies=2)) != alone


def test_some_texts_are_right_as_they_are():
    texts = [f"{TEXT} {number}" for number in range(400)]
    right = sum(source == target for source, target in pairs(texts, right=0.3))
    assert 90 < right < 150
    # At a rate, a text may happen to get none.
    right = sum(source == target for source, target in pairs(texts, rate=0.02, right=0.0))
    assert right > 150
    assert all(source == target for source, target in pairs(texts, right=1.0))


def test_mistakes_are_told_in_a_line():
    with pytest.raises(InputError, match="rate is 1.5: give the share"):
        corrupt(TEXT, random.Random(0), rate=1.5)
    with pytest.raises(InputError, match="kinds are typo: use some of drop"):
        list(pairs([TEXT], kinds=["typo"]))
    with pytest.raises(InputError, match="right is -1.0: give the share"):
        list(pairs([TEXT], right=-1.0))
