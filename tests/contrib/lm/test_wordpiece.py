"""WordPiece vocabularies: ids, texts, and what is refused."""

import json

import pytest

from spec_t5x.checkpoints.storage.vocabularies import make_vocabulary
from spec_t5x.contrib.lm.wordpiece import WordPieceVocabulary, train_wordpiece
from spec_t5x.errors import InputError

TEXTS = ["The cat sleeps.", "The cats are sleeping in the garden.", "Don't wake the cat!"] * 5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return train_wordpiece(TEXTS, tmp_path_factory.mktemp("wordpiece") / "tokenizer.json", 60)


@pytest.fixture(scope="module")
def vocabulary(path):
    return WordPieceVocabulary(path)


def test_text_comes_back_in_lower_case(vocabulary):
    ids = vocabulary.encode("The cats are sleeping.")
    assert min(ids) > 2
    assert vocabulary.decode(ids) == "the cats are sleeping."
    # Padding, ids without a piece and all after the first end are skipped.
    assert vocabulary.decode([0, *ids, 99, 1, *ids]) == "the cats are sleeping."
    assert vocabulary.encode_batch(["The cats are sleeping.", ""]) == [ids, []]


def test_pieces_that_continue_a_word_do_not_begin_one(vocabulary):
    starts = vocabulary.word_starts()
    for token in range(3, vocabulary.vocab_size):
        piece = vocabulary.piece(token)
        assert starts[token] == (not (piece.startswith("##") and piece[2:].isalnum()))
    assert starts[1] and not starts.all()


def test_the_name_of_a_special_piece_in_a_text_is_text(vocabulary):
    ids = vocabulary.encode("the [END] cat")
    assert 1 not in ids
    # The brackets are not in the vocabulary.
    assert 2 in ids


def test_one_training_gives_one_vocabulary(path, tmp_path, vocabulary):
    again = train_wordpiece(TEXTS, tmp_path / "tokenizer.json", 60)
    assert WordPieceVocabulary(again).vocab_size == 60
    vocabulary.save(tmp_path / "copy")
    copy = WordPieceVocabulary(tmp_path / "copy" / "tokenizer.json")
    assert copy.fingerprint() == vocabulary.fingerprint()
    assert make_vocabulary(str(path), 60).fingerprint() == vocabulary.fingerprint()
    other = train_wordpiece(TEXTS, tmp_path / "other.json", 50)
    assert WordPieceVocabulary(other).fingerprint() != vocabulary.fingerprint()


def test_other_files_are_refused(tmp_path, path):
    with pytest.raises(InputError, match="no vocabulary at"):
        WordPieceVocabulary(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match="is not a tokenizer of the tokenizers library"):
        WordPieceVocabulary(tmp_path / "broken.json")
    values = json.loads(path.read_text())
    pieces = values["model"]["vocab"]
    pieces["[PAD]"] = pieces.pop("[START]")
    (tmp_path / "foreign.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"begins with \[PAD\], \[END\], \[UNK\], not with"):
        WordPieceVocabulary(tmp_path / "foreign.json")
