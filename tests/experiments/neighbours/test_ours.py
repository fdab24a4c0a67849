"""Our own decoding as a neighbour: the ids that the package gives everywhere else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments.neighbours import ours
from spec_t5x.generation import GenerateOptions, Generator
from tests.experiments.neighbours.conftest import MAX_DECODE_LEN, TEXTS

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_plain_ids_are_those_of_the_generator(job, outputs):
    options = GenerateOptions(max_decode_len=MAX_DECODE_LEN, max_source_len=48)
    generated = Generator.load(job.target).generate(TEXTS, options)
    assert outputs == [generation.output_ids for (generation,) in generated]


def test_speculative_ids_are_the_same(job, inputs, outputs):
    draft = ours.make(job, draft="draft", gamma=2, verifier="token")
    assert [draft.decode(ids, MAX_DECODE_LEN) for ids in inputs] == outputs


def test_it_stops_where_it_is_told_to(job, inputs, outputs):
    for decoder in (ours.make(job), ours.make(job, draft="draft", gamma=2, verifier="token")):
        assert decoder.decode(inputs[0], 1) == outputs[0][:1]
        assert decoder.encode(inputs[0]) is True


def test_a_margin_is_a_difference_of_the_targets_logits(job, inputs, outputs):
    generator = Generator.load(job.target)
    prefix = outputs[0][:3]
    score = jax.jit(lambda model, ids, new: model.score(model.prefill(ids, 8), new)[0])
    new = jnp.asarray([[0, *prefix]], jnp.int32)
    logits = score(generator.target, jnp.asarray([inputs[0]], jnp.int32), new)
    expected = float(logits[0, 3, 5] - logits[0, 3, 7])
    found = ours.make(job).margin(inputs[0], prefix, 5, 7)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert found != 0


def test_drawn_verdicts_decide_how_often_the_target_is_called(job, inputs):
    drawn = dataclasses.replace(job, alpha=1.0)
    decoder = ours.make(drawn, draft="draft", gamma=3)
    assert len(decoder.decode(inputs[0], MAX_DECODE_LEN)) >= 1
    batch = decoder._batch(inputs[0])
    stats = decoder._generator.decode(batch, decoder._options).stats
    # Everything that was verified stood, whatever it was.
    assert int(stats.accepted.sum()) == int(stats.verified.sum()) > 0


def test_a_draft_that_does_not_exist_is_refused(job):
    with pytest.raises(InputError, match="no draft 'absent'"):
        ours.make(job, draft="absent", gamma=2)


def test_the_version_names_the_package_and_jax():
    assert ours.version().startswith("spec_t5x ") and "JAX " in ours.version()
