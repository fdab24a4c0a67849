"""Texts of a target: those of plain decoding, in any batch, stored in parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.labs.training import target_outputs
from spec_t5x.labs.training.batching import join_pairs
from spec_t5x.labs.training.target_outputs import SampleOptions, sample_targets
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.machine.operations import Operations
from spec_t5x.sampling.distributions import sampling
from tests.toy_t5 import disturbed, tiny_t5

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
    return join_pairs([*((source, [1]) for source in sources), None, None])


def expected_text(source, place, temperature):
    """Decodes one source by itself."""
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
    pairs, options = make_pairs(), dataclasses.replace(OPTIONS, temperature=temperature)
    texts = sample_targets(TARGET, pairs, options, None)
    assert texts.source is pairs.source and texts.num_dropped == 2
    given = zip(texts.source.split(), texts.target.split(), strict=True)
    for place, (source, text) in enumerate(given):
        np.testing.assert_array_equal(text, expected_text(source, place, temperature))
    lengths = texts.target.lengths
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
    logged = caplog.messages
    assert len(logged) == 3 and logged[1] == "dev.tsv: the target has written 8 of 9 texts (T=1)"
    monkeypatch.undo()
    whole = sample_targets(TARGET, pairs, OPTIONS, None)
    np.testing.assert_array_equal(resumed.target.ids, whole.target.ids)
    np.testing.assert_array_equal(resumed.target.ends, whole.target.ends)


def test_texts_of_another_target_or_setting_are_not_taken_for_these(tmp_path):
    another = dataclasses.replace(TARGET, target=disturbed(TARGET.target, 0.1))
    pairs, other_seed = make_pairs(), dataclasses.replace(OPTIONS, seed=1)
    # Outputs do not depend on their batch.
    other_batches = dataclasses.replace(OPTIONS, tokens_per_batch=8, buckets=(8,))
    for number, given in (
        (1, (TARGET, pairs, OPTIONS)),
        (1, (TARGET, pairs, OPTIONS)),
        (1, (TARGET, pairs, other_batches)),
        (2, (another, pairs, OPTIONS)),
        (3, (TARGET, pairs, other_seed)),
        (4, (TARGET, make_pairs((3, 4)), OPTIONS)),
    ):
        sample_targets(*given, tmp_path)
        assert len(list(tmp_path.iterdir())) == number


def test_a_folder_is_named_by_all_that_outputs_depend_on():
    pairs, settings = make_pairs((3, 4)), {"temperature": 0.5, "max_length": 8, "seed": 1}
    others = [dataclasses.replace(OPTIONS, **{name: value}) for name, value in settings.items()]
    # The same ids, parted elsewhere.
    ids = pairs.source.ids
    parted = join_pairs([(ids[:4], [1]), (ids[4:], [1])])
    kernels = TARGET.target.replace(operations=type("Kernels", (Operations,), {})())
    other = dataclasses.replace(TARGET, target=kernels)
    given = [(TARGET, pairs, OPTIONS), *((TARGET, pairs, each) for each in others)]
    given += [(TARGET, parted, OPTIONS), (other, pairs, OPTIONS)]
    assert len({target_outputs._key(*each) for each in given}) == len(given)


def test_outputs_that_find_no_room(tmp_path, disk):
    texts = join_pairs([((), [5] * 2000)]).target
    path = tmp_path / "cache" / "000000000.npz"
    disk.fill()
    message = rf"cannot write {path} \(File too large\): free some space"
    with pytest.raises(InputError, match=message):
        target_outputs._store(path, texts)
    disk.clear()
    assert not list(path.parent.iterdir())
