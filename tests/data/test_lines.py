"""Lines of text: which are read, and how they are batched."""

import gzip

import numpy as np
import pytest

from spec_t5x.data.batching import Batches, tokenise_lines
from spec_t5x.data.tsv import read_lines
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError

VOCABULARY = ByteVocabulary(0)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.tsv").write_text("tag\tone\teins\ntag\t \tzwei\ntag\tthree\tdrei\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as stream:
        stream.write("four\n\nfive\n")
    return tmp_path


def test_columns_of_several_files_are_read_in_order(files):
    pairs = {"columns": (1, 2), "num_columns": 3}
    found = list(read_lines([files / "a.tsv"], **pairs))
    assert sorted(found) == sorted(["one", "three", "eins", "zwei", "drei"])
    assert list(read_lines([files / "a.tsv"], columns=(2,), num_columns=3)) == [
        *("eins", "zwei", "drei")
    ]
    assert list(read_lines([files / "b.txt.gz", files / "b.txt.gz"], limit=3)) == [
        *("four", "five", "four")
    ]


def test_nothing_to_read_is_refused(files):
    with pytest.raises(InputError, match=r"files are \[\], columns \[0\]: give at least one"):
        list(read_lines([]))
    with pytest.raises(InputError, match="3 columns, not 1"):
        list(read_lines([files / "a.tsv"]))


def test_a_line_is_the_start_token_its_ids_and_the_end():
    lines = tokenise_lines(["abc", "x", "longer than that"], VOCABULARY, max_length=6)
    assert (len(lines), lines.num_dropped) == (2, 1)
    assert lines.target_lengths.tolist() == [4, 2]
    (batch,) = Batches(lines, tokens_per_batch=8, seed=0, buckets=(4, 8)).one_pass()
    ids = VOCABULARY.encode("abc")
    np.testing.assert_array_equal(
        batch.decoder_target_tokens, [[*ids, 1], [*VOCABULARY.encode("x"), 1, 0, 0]]
    )
    np.testing.assert_array_equal(batch.decoder_input_tokens[0], [0, *ids])
    assert batch.encoder_input_tokens.shape == (2, 0)
    assert (batch.num_tokens, batch.num_pairs) == (6, 2)
