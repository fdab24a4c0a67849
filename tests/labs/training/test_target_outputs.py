"""Texts of a target: what plain decoding gives, whatever the batch, kept in parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.generation import Generator
from spec_t5x.labs.training import target_outputs
from spec_t5x.labs.training.batching import TokenisedPairs, join_pairs
from spec_t5x.labs.training.target_outputs import SampleOptions, sample_targets
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.testing.toy_models import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

OPTIONS = SampleOptions(temperature=1.0, max_length=16, tokens_per_batch=24, buckets=(4, 8))
TARGET = Generator(target=tiny_t5(0), vocabulary=ByteVocabulary(), max_source_len=16)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(target_outputs, "PART_SIZE", 4)


def make_pairs(lengths=(3, 8, 4, 2, 6, 5, 8, 3, 7)):
    """Sources that end in EOS, and targets of one token."""
    rng = np.random.default_rng(0)
    sources = [[*rng.integers(3, 30, length - 1).tolist(), 1] for length in lengths]
    return join_pairs(((source, [1]) for source in sources), num_dropped=2)


def each_side(pairs, side):
    ids, ends = getattr(pairs, f"{side}_ids"), getattr(pairs, f"{side}_ends")
    return np.split(ids, ends[:-1])


def expected_text(source, place, temperature):
    """The text of one source, decoded by itself."""
    key = jax.random.fold_in(jax.random.key(OPTIONS.seed), place)
    tokens = autoregressive_decode(
        TARGET.target,
        jnp.asarray(np.pad(source, (0, 8 - len(source))))[None],
        jnp.zeros((1, 1), jnp.int32),
        key[None],
        sampling(temperature),
        max_decode_len=OPTIONS.max_length,
    ).tokens[0, 0]
    zeros = np.flatnonzero(np.asarray(tokens) == 0)
    return tokens[: zeros[0] if len(zeros) else None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_source_gets_the_text_that_it_gets_alone(temperature):
    pairs = make_pairs()
    texts = sample_targets(
        TARGET, pairs, dataclasses.replace(OPTIONS, temperature=temperature), None
    )
    np.testing.assert_array_equal(texts.source_ids, pairs.source_ids)
    np.testing.assert_array_equal(texts.source_ends, pairs.source_ends)
    assert texts.num_dropped == 2
    for place, (source, text) in enumerate(
        zip(each_side(texts, "source"), each_side(texts, "target"), strict=True)
    ):
        np.testing.assert_array_equal(text, expected_text(source, place, temperature))
    lengths = texts.target_lengths
    assert lengths.max() == OPTIONS.max_length
    # This target's greedy texts do not end; of the others some do.
    assert (lengths.min() < OPTIONS.max_length) == (temperature > 0)


def test_a_run_that_was_killed_resumes_with_the_next_part(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="spec_t5x")
    pairs, real, written = make_pairs(), target_outputs._sample_part, []

    def sample_part(target, sources, first, options):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(first)
        return real(target, sources, first, options)

    monkeypatch.setattr(target_outputs, "_sample_part", sample_part)
    with pytest.raises(KeyboardInterrupt):
        sample_targets(TARGET, pairs, OPTIONS, tmp_path)
    written.clear()
    caplog.clear()
    resumed = sample_targets(TARGET, pairs, OPTIONS, tmp_path, "dev.tsv")
    assert written == [8]
    said = caplog.messages
    assert len(said) == 3 and said[1] == "dev.tsv: the target has written 8 of 9 texts (T=1)"
    monkeypatch.undo()
    whole = sample_targets(TARGET, pairs, OPTIONS, None)
    for field in dataclasses.fields(TokenisedPairs):
        np.testing.assert_array_equal(getattr(resumed, field.name), getattr(whole, field.name))


def test_texts_of_another_target_or_setting_are_not_taken_for_these(tmp_path):
    pairs = make_pairs()
    sample_targets(TARGET, pairs, OPTIONS, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    sample_targets(TARGET, pairs, OPTIONS, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    another = dataclasses.replace(TARGET, target=disturbed(TARGET.target, 0.1))
    sample_targets(another, pairs, OPTIONS, tmp_path)
    sample_targets(TARGET, pairs, dataclasses.replace(OPTIONS, seed=1), tmp_path)
    sample_targets(TARGET, make_pairs((3, 4)), OPTIONS, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
