"""Kinds of tokens, for vocabularies that mark words in different ways."""

import pytest

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.data.token_kinds import token_kinds
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary


class Pieces(SentencePieceVocabulary):
    """A vocabulary of given pieces, after the special ones."""

    def __init__(self, *pieces):
        self.pieces = ("<pad>", "</s>", "<unk>", *pieces)

    @property
    def vocab_size(self):
        return len(self.pieces)

    def piece(self, token):
        return self.pieces[token]


@pytest.mark.parametrize(
    ("pieces", "kinds"),
    [
        (
            ("▁Haus", "tür", "▁", "▁2010", "5,5", ".", "▁(", "▁A4", "<extra_id_0>"),
            "word continuation word digits digits punctuation punctuation word other",
        ),
        (
            ("house", "##s", "2010", "##5", ".", "##,", "[UNK]"),
            "word continuation digits digits punctuation punctuation other",
        ),
        (("Ġhouse", "s", "Ġ10", "!"), "word continuation digits punctuation"),
    ],
    ids=["sentencepiece", "wordpiece", "gpt2"],
)
def test_pieces_have_their_kinds(pieces, kinds):
    found = token_kinds(Pieces(*pieces), len(pieces) + 5).tolist()
    # And two ids that only the embedding has.
    assert found == ["other", "end", "other", *kinds.split(), "other", "other"]


def test_bytes_mark_no_words():
    vocabulary = ByteVocabulary()
    kinds = token_kinds(vocabulary, vocabulary.vocab_size)
    ids = vocabulary.encode("a4.ä")
    expected = ["continuation", "digits", "punctuation", "continuation", "continuation"]
    assert kinds[ids].tolist() == expected
    assert kinds[[1, 380]].tolist() == ["end", "other"]


def test_real_text_has_all_kinds():
    vocabulary = SentencePieceVocabulary(PACKAGED_MODELS / "ende-target" / "spiece.model")
    kinds = token_kinds(vocabulary, vocabulary.vocab_size + 3)
    assert len(kinds) == vocabulary.vocab_size + 3
    ids = [*vocabulary.encode("Die Donaudampfschiffe kosten 1.500 Euro."), 1]
    assert set(kinds[ids]) == {"word", "continuation", "digits", "punctuation", "end"}
    assert kinds[ids[0]] == "word"
