"""Vocabularies: T5's conventions, round trips, fingerprints."""

import random

import pytest
import sentencepiece

from spec_t5x.data.vocabulary import (
    ByteVocabulary,
    SentencePieceVocabulary,
    model_proto,
    read_spiece,
)
from spec_t5x.errors import InputError
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece

SYLLABLES = ("ba", "do", "ki", "lu", "mö", "ne", "ra", "schi", "to", "wü", "…", "»")


def make_texts(number=400):
    rng = random.Random(0)

    def word():
        return "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))

    return [" ".join(word() for _ in range(rng.randint(2, 9))) for _ in range(number)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("vocabulary") / "spiece"
    return train_sentencepiece(make_texts(), prefix, 120, character_coverage=1.0)


def test_round_trip_keeps_the_text_as_it_is(model_path):
    vocabulary = SentencePieceVocabulary(model_path)
    # nmt_nfkc would turn the ellipsis into three dots and merge the spaces.
    for text in [*make_texts(50), "ba…  do »ki", "mö\u2026"]:
        ids = vocabulary.encode(text)
        assert 1 not in ids
        assert vocabulary.decode(ids) == text
    assert vocabulary.decode([0, *ids, 120, 5000, -1, 0, 1, *ids]) == text
    assert vocabulary.decode([]) == ""


def test_extra_ids_follow_the_pieces_and_the_first_is_the_highest(model_path, tmp_path):
    vocabulary = SentencePieceVocabulary(model_path, extra_ids=10)
    assert vocabulary.vocab_size == 130
    assert [vocabulary.decode([i]) for i in (129, 120)] == ["<extra_id_0>", "<extra_id_9>"]
    assert 129 in vocabulary.encode("ba <extra_id_0> do")
    vocabulary.save(tmp_path)
    saved = SentencePieceVocabulary(tmp_path / "spiece.model", extra_ids=10)
    assert saved.fingerprint() == vocabulary.fingerprint()
    saved.save(tmp_path)  # onto itself


def test_fingerprints_tell_vocabularies_apart(model_path, tmp_path):
    other = train_sentencepiece(make_texts(), tmp_path / "other", 100, character_coverage=1.0)
    spieces = ((model_path, 0), (model_path, 1), (other, 0))
    vocabularies = [SentencePieceVocabulary(*given) for given in spieces]
    vocabularies += [ByteVocabulary(), ByteVocabulary(0)]
    fingerprints = {each.fingerprint() for each in vocabularies}
    assert len(fingerprints) == 5 and set(map(len, fingerprints)) == {64}


@pytest.mark.parametrize("bytes_", [False, True])
def test_words_begin_where_the_text_has_a_space(model_path, bytes_):
    vocabulary = ByteVocabulary() if bytes_ else SentencePieceVocabulary(model_path)
    starts = vocabulary.word_starts()
    assert starts.shape == (vocabulary.vocab_size,) and starts[1]
    for text in [*make_texts(20), "ba do… »ki"]:
        ids = vocabulary.encode(" " + text if bytes_ else text)
        # Punctuation is not a part of the word.
        pieces = [vocabulary.piece(token).lstrip("▁") for token in ids]
        marks = 0 if bytes_ else sum(bool(piece) and not piece.isalnum() for piece in pieces)
        assert len(text.split()) <= sum(starts[ids]) <= len(text.split()) + marks
        assert bytes_ or all(starts[i] for i, p in zip(ids, pieces, strict=True) if p == "…")


def test_bytes(tmp_path):
    vocabulary = ByteVocabulary()
    assert vocabulary.vocab_size == 384  # ByT5's
    assert vocabulary.encode("aä") == [100, 198, 167]
    assert vocabulary.decode([100, 198, 167, 0, 259, 383, 400, 1, 100]) == "aä"
    assert vocabulary.decode([198, 100]) == "a"  # half of a character
    vocabulary.save(tmp_path / "bytes")
    assert not (tmp_path / "bytes").exists()


@pytest.mark.parametrize("digits", ["1\u0660", "01", "1" * 5000])
def test_digits_that_are_no_sentinels(model_path, digits):
    spiece = SentencePieceVocabulary(model_path, 100, reads_sentinels=True)
    for vocabulary in (spiece, ByteVocabulary(100, reads_sentinels=True)):
        first = vocabulary.vocab_size - vocabulary.extra_ids
        assert max(vocabulary.encode("ba <extra_id_10>")) >= first
        assert max(vocabulary.encode(f"ba <extra_id_{digits}>")) < first


@pytest.mark.parametrize(
    ("name", "extra_ids", "message"),
    [
        ("text.model", 0, "not a SentencePiece model"),
        ("nowhere.model", 0, r"nowhere\.model"),
        ("bos.model", 0, "pad, eos, unk"),
        ("bos.model", -1, "extra_ids is -1"),
        ("bos.model", 10**9, "extra_ids is 1000000000: give at least 0, at most 1000000"),
    ],
)
def test_files_that_are_no_vocabulary_are_refused(tmp_path, name, extra_ids, message):
    (tmp_path / "text.model").write_text("no model")
    if name == "bos.model":
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(make_texts()),
            model_prefix=str(tmp_path / "bos"),
            vocab_size=100,
            minloglevel=2,
        )
    with pytest.raises(InputError, match=message):
        SentencePieceVocabulary(tmp_path / name, extra_ids)


@pytest.mark.parametrize(
    "read",
    [SentencePieceVocabulary, lambda path: SentencePieceVocabulary(path, 100), read_spiece],
    ids=["loaded", "appended", "parsed"],
)
def test_a_file_that_is_cut_off_between_two_pieces_is_refused(tmp_path, model_path, read):
    """SentencePiece itself loads it, with fewer pieces."""
    model = model_proto().FromString(model_path.read_bytes())
    content = model_proto()(pieces=model.pieces[:50]).SerializeToString()
    assert model_path.read_bytes().startswith(content)
    assert sentencepiece.SentencePieceProcessor(model_proto=content).get_piece_size() == 50
    path = tmp_path / "spiece.model"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a SentencePiece model .it ends after its pieces"):
        read(path)


@pytest.mark.parametrize("extra_ids", [0, 10])
def test_a_model_without_the_specification_of_its_training_is_whole(
    tmp_path, model_path, extra_ids
):
    """The specification is optional. A long piece has a length of two bytes."""
    model = model_proto().FromString(model_path.read_bytes())
    model.ClearField("trainer_spec")
    model.pieces.add(piece="ä" * 150, score=-9.0)
    path = tmp_path / "spiece.model"
    path.write_bytes(model.SerializeToString())
    assert SentencePieceVocabulary(path, extra_ids).vocab_size == 121 + extra_ids
    assert len(read_spiece(path)[0]) == 121


def test_impossible_vocabulary_size(tmp_path):
    with pytest.raises(InputError, match="100000 pieces"):
        train_sentencepiece(make_texts(), tmp_path / "spiece", 100_000)
