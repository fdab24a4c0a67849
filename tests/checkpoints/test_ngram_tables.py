"""N-gram tables on disk: round trips, and every fault in one line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native.ngram_tables import load_ngram
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.labs.training.exports import save_ngram
from spec_t5x.labs.training.ngram_counts import count_ngrams, join_texts
from spec_t5x.types import EOS_ID
from tests.checkpoints.faults import edit_config, message_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

ORDER = 3


@pytest.fixture(scope="module")
def draft(vocabulary):
    rng = np.random.default_rng(0)
    texts = [[*rng.integers(2, 12, rng.integers(3, 9)).tolist(), EOS_ID] for _ in range(80)]
    return count_ngrams(join_texts(texts), vocabulary.vocab_size, order=ORDER)


@pytest.fixture
def directory(tmp_path, draft, vocabulary):
    save_ngram(tmp_path / "ngrams", draft, vocabulary, extra={"counted": {"texts": 80}})
    return tmp_path / "ngrams"


def test_round_trip_is_exact(directory, draft):
    loaded = load_ngram(directory)
    assert jax.tree.structure(loaded) == jax.tree.structure(draft)
    for found, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(draft), strict=True):
        assert isinstance(found, jax.Array)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_lower_orders_come_from_the_same_file(directory, draft):
    assert load_ngram(directory, order=1).levels == ()
    bigrams = load_ngram(directory, order=2)
    assert bigrams.order == 2
    np.testing.assert_array_equal(bigrams.levels[0].masses, draft.levels[0].masses)
    assert "order is 4: give 1 to 3" in message_of(load_ngram, directory, order=4)


def test_gets_the_size_of_its_target(directory, saved):
    target = load(saved)
    draft = load_ngram(directory, target)
    assert draft.vocab_size == target.config.vocab_size == 96
    law = draft.next_probs(jnp.array([0, 5]))
    assert np.all(law[40:] == 0)
    assert np.sum(law) == pytest.approx(1)


def test_refuses_a_target_of_another_vocabulary(directory, saved, tmp_path, draft, spiece):
    target = load(saved)
    more_ids = SentencePieceVocabulary(spiece, extra_ids=4)
    extended = count_ngrams(join_texts([[2, 3, EOS_ID]] * 2), more_ids.vocab_size, order=2)
    save_ngram(tmp_path / "extended", extended, more_ids)
    message = message_of(load_ngram, tmp_path / "extended", target)
    assert "different vocabularies (44 and 40 ids)" in message
    assert str(saved) in message
    # Of the same size, with other pieces.
    edit_config(directory, vocabulary="0123456789abcdef")
    assert "(40 and 40 ids)" in message_of(load_ngram, directory, target)


def test_refuses_to_save_what_does_not_belong_together(tmp_path, draft, vocabulary):
    path = tmp_path / "new"
    message = message_of(save_ngram, path, draft, ByteVocabulary())
    assert "have 40 tokens and the vocabulary 384" in message
    message = message_of(save_ngram, path, draft, vocabulary, extra={"order": 2})
    assert "'order' is a name of the format" in message
    assert not path.exists()


def test_something_else_or_nothing(saved, tmp_path):
    assert "has format 'spec_t5x', not 'spec_t5x_ngram'" in message_of(load_ngram, saved)
    assert f"no directory {tmp_path / 'absent'}" in message_of(load_ngram, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "no file" in message_of(load_ngram, tmp_path / "empty")


def test_a_damaged_config(directory):
    edit_config(directory, version=2)
    assert "has version 2, this spec_t5x reads 1" in message_of(load_ngram, directory)
    edit_config(directory, version=1, order="three")
    assert "config.json describes no n-grams" in message_of(load_ngram, directory)
    edit_config(directory, order=ORDER + 1)
    assert "ngrams.safetensors has no 4.children" in message_of(load_ngram, directory)
    edit_config(directory, order=ORDER, vocab_size=41)
    assert "not of 41 tokens or do not fit" in message_of(load_ngram, directory)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name", ["2.children", "2.tokens", "3.num_successors", "2.successors", "3.masses"]
)
def test_tables_that_do_not_fit_together(directory, name):
    path = directory / "ngrams.safetensors"
    arrays = load_file(path)
    if name == "3.masses":
        arrays[name] = arrays[name][1:]
    else:
        arrays[name][0] += 40
    save_file(arrays, path)
    assert "of 40 tokens or do not fit together" in message_of(load_ngram, directory)
