"""Vocabularies by name, and their number of extra ids, which is never guessed."""

import pytest

from spec_t5x.checkpoints.loading import named_vocabulary, open_model
from spec_t5x.checkpoints.storage.vocabularies import make_vocabulary
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.errors import InputError
from tests.checkpoints.faults import message_of, with_sentinels


# The tiny vocabulary has 40 pieces: with or without 100 extra ids it is padded to 256 or 128.
@pytest.mark.parametrize(("rows", "extra_ids"), [(40, 0), (128, 0), (140, 100), (256, 100)])
def test_extra_ids_are_told_from_the_rows(spiece, rows, extra_ids):
    assert make_vocabulary(spiece, rows).extra_ids == extra_ids


@pytest.mark.parametrize("rows", [96, 384])
def test_what_cannot_be_told_is_asked_for(spiece, rows):
    with pytest.raises(InputError, match=rf"embeds {rows} ids.*tiny.model:100 or tiny.model:0"):
        make_vocabulary(spiece, rows)
    assert make_vocabulary(f"{spiece}:56", rows).vocab_size == 96


def test_a_file_that_holds_its_sentinels(spiece, tmp_path):
    """Files of mT5 and T5X's ``…100extra`` do; nothing is appended for any number of rows."""
    vocabulary = make_vocabulary(with_sentinels(spiece, tmp_path / "3extra.model", 3), 96)
    assert (vocabulary.extra_ids, vocabulary.vocab_size) == (0, 43)
    appended = SentencePieceVocabulary(spiece, 3)
    assert vocabulary.fingerprint() == appended.fingerprint()


def test_bytes():
    assert make_vocabulary("bytes", 384).fingerprint() == ByteVocabulary().fingerprint()
    assert make_vocabulary("bytes", 272).vocab_size == 272
    assert make_vocabulary("bytes", 96).extra_ids == 0
    assert make_vocabulary("bytes", 512).extra_ids == 125
    assert make_vocabulary("bytes:3", 384).extra_ids == 3
    vocabulary = ByteVocabulary(5)
    assert make_vocabulary(vocabulary, 384) is vocabulary


def test_a_folder_of_tokenizer_files(spiece, tmp_path, saved):
    """The folder is read as a Hugging Face directory's, with T5's ids."""
    (tmp_path / "spiece.model").write_bytes(spiece.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 3}')
    vocabulary = named_vocabulary(tmp_path)
    assert vocabulary.fingerprint() == SentencePieceVocabulary(spiece, 3).fingerprint()
    assert vocabulary.encode("box<extra_id_0>")[-1] == vocabulary.vocab_size - 1
    message = message_of(open_model, saved, vocabulary=tmp_path)
    assert "already holds a vocabulary (40 ids), which differs from" in message


def test_files_that_are_none(tmp_path, spiece):
    with pytest.raises(InputError, match="no vocabulary at .*absent.model"):
        make_vocabulary(tmp_path / "absent.model", 384)
    with pytest.raises(InputError, match="no vocabulary at .*absent.model"):
        make_vocabulary(f"{tmp_path}/absent.model:7", 384)
    # A colon may be part of the name.
    odd = tmp_path / "odd:100"
    odd.write_bytes(spiece.read_bytes())
    assert make_vocabulary(odd, 128).extra_ids == 0
