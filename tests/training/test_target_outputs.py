"""Texts of a target: what plain decoding gives, whatever the batch, kept in parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.data.batching import TokenisedPairs
from spec_t5x.errors import InputError
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.testing.toy_models import disturbed, tiny_t5
from spec_t5x.training import target_outputs
from spec_t5x.training.target_outputs import SampleOptions, sample_outputs, sample_targets

pytestmark = pytest.mark.usefixtures("quick_compilation")

OPTIONS = SampleOptions(
    temperature=1.0, max_length=16, tokens_per_batch=24, buckets=(4, 8), part_size=4
)
TARGET = tiny_t5(0)


def make_pairs(lengths=(3, 8, 4, 2, 6, 5, 8, 3, 7)):
    """Sources that end in EOS, and targets of one token."""
    rng = np.random.default_rng(0)
    sources = [[*rng.integers(3, 30, length - 1), 1] for length in lengths]
    return TokenisedPairs(
        source_ids=np.concatenate(sources).astype(np.int32),
        source_ends=np.cumsum(lengths),
        target_ids=np.ones(len(lengths), np.int32),
        target_ends=np.arange(1, len(lengths) + 1),
        num_dropped=2,
    )


def each_side(pairs, side):
    ids, ends = getattr(pairs, f"{side}_ids"), getattr(pairs, f"{side}_ends")
    return np.split(ids, ends[:-1])


def expected_text(source, place, temperature):
    """The text of one source, decoded by itself."""
    key = jax.random.fold_in(jax.random.key(OPTIONS.seed), place)
    tokens = autoregressive_decode(
        TARGET,
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


def test_a_run_that_was_killed_goes_on_with_the_next_part(tmp_path, monkeypatch):
    pairs, real, written = make_pairs(), target_outputs._sample_part, []

    def sample_part(target, part, first, options):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(first)
        return real(target, part, first, options)

    monkeypatch.setattr(target_outputs, "_sample_part", sample_part)
    with pytest.raises(KeyboardInterrupt):
        sample_targets(TARGET, pairs, OPTIONS, tmp_path)
    written.clear()
    told = []
    resumed = sample_targets(TARGET, pairs, OPTIONS, tmp_path, lambda *counts: told.append(counts))
    assert written == [8]
    assert told == [(4, 9), (8, 9), (9, 9)]
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
    sample_targets(disturbed(TARGET, 0.1), pairs, OPTIONS, tmp_path)
    sample_targets(TARGET, pairs, dataclasses.replace(OPTIONS, seed=1), tmp_path)
    sample_targets(TARGET, make_pairs((3, 4)), OPTIONS, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_text_ends_where_a_model_says_padding():
    """Training would take all that follows for padding."""
    rows = 64
    sources = jnp.tile(jnp.array([[5, 6, 1]]), (rows, 1))
    keys = jax.random.split(jax.random.key(0), rows)
    is_row = jnp.arange(rows) < rows - 3
    settings = sampling(3.0)
    tokens = sample_outputs(TARGET, sources, keys, settings, is_row, max_length=10)
    raw = autoregressive_decode(
        TARGET, sources, jnp.zeros((rows, 1), jnp.int32), keys, settings, max_decode_len=10
    )
    says_padding = np.any(
        (raw.tokens[:, 0] == 0) & (np.arange(10) < np.asarray(raw.lengths)), axis=1
    )
    assert says_padding.any()
    assert not np.any((tokens[:, :-1] == 0) & (tokens[:, 1:] != 0))
    assert not tokens[-3:].any()
    kept = tokens != 0
    np.testing.assert_array_equal(tokens, np.where(kept, raw.tokens[:, 0], 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"temperature": -1.0}, "temperature"), ({"part_size": 0}, "part_size")],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(OPTIONS, **changes)
