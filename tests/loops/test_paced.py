"""Decoding at a pace: the same text and law under all decisions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.testing import laws
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode, speculative_steps
from spec_t5x.sampling.distributions import sampling
from spec_t5x.verifiers import CoupledVerifier
from tests.loops.stubs import drain, writes_the_source
from tests.toy_drafts import ConstantDraft, StubTarget, TableDraft

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1
GREEDY = sampling(0.0)
KEY = jax.random.key(0)
NO_PROMPT = jnp.zeros((1, 1), jnp.int32)


def says_2_at_first(sources, prefixes):
    """Errs at the first six tokens, and after texts other than the source's beginning."""
    width = prefixes.shape[1]
    text = jnp.pad(sources, ((0, 0), (1, width)))[:, :width]
    wrong = (jnp.arange(width) < 6)[None, :] | (jnp.cumsum(prefixes != text, axis=1) > 0)
    right = writes_the_source(16)(sources, prefixes)
    return jnp.where(wrong[:, :, None], 9.0 * jax.nn.one_hot(2, 16), right)


WRITER = StubTarget(writes_the_source(16), 16)
LATE = TransformerDraft(StubTarget(says_2_at_first, 16))
SOURCE = jnp.array([[5, 6, 7, 8, 9, 4, 3, 5, 6, 7, 8, 9, 4, 3, 5, 6, EOS]])
COSTS = Costs(iteration=(1.0, 1.2, 1.4, 1.6), prefill=0.5)
OPTIONS = {"gamma": 3, "max_decode_len": 20}


def pace():
    """Makes a pace that looks again within a text of a few tokens."""
    return Pace.start(COSTS, rest=1)


def decode(draft=LATE, pace=None):
    return speculative_decode(WRITER, draft, SOURCE, NO_PROMPT, KEY, GREEDY, **OPTIONS, pace=pace)


def test_a_draft_that_becomes_good_is_asked_again():
    """Wrong about six tokens: iterations, then plain steps; then right: iterations."""
    before = pace()
    decoded = decode(pace=before)
    np.testing.assert_array_equal(decoded.tokens[0, 0, :17], SOURCE[0])
    stats, after = decoded.stats, decoded.pace
    assert int(stats.plain_steps[0, 0]) > 0
    assert int(stats.accepted[0, 0]) >= 4
    assert int(after.plain_steps) == int(stats.plain_steps[0, 0])
    assert int(after.iterations) == int((stats.target_calls - stats.plain_steps)[0, 0])
    # All proposals were as long as they might be.
    assert int(after.drafted) == int(stats.proposed[0, 0])
    assert float(after.written) == 17
    assert after.length == before.length + (17 - before.length) / 4
    # Step by step.
    arguments = WRITER, LATE, SOURCE, NO_PROMPT, KEY, GREEDY
    steps, stepped = drain(speculative_steps(*arguments, **OPTIONS, pace=before))
    assert int(before.iterations) == 0
    assert 0 in [int(step.num_proposed[0]) for step in steps]
    assert len(steps) == int(stats.target_calls[0, 0])
    text = [token for step in steps for token in step.appended[0, : step.num_appended[0]].tolist()]
    assert text == SOURCE[0].tolist()
    for found, wanted in zip(jax.tree.leaves(stepped), jax.tree.leaves(decoded), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_an_iteration_costs_what_a_draft_that_varies_proposed():
    decoded = decode(CopyDraft(16), pace=pace())
    iterations = int(decoded.pace.iterations)
    assert int(decoded.pace.drafted) == int(decoded.stats.proposed[0, 0]) < 3 * iterations


def test_a_draft_that_failed_in_one_batch_is_not_tried_in_the_next():
    """A hopeless draft is tried in the first text, and not in the second."""
    draft = ConstantDraft(jnp.int32(2), 16)
    now, iterations = Pace.start(Costs.by_formula(c=0.5, largest=3), rest=40), []
    for _ in range(2):
        decoded = decode(draft, now)
        stats = decoded.stats
        iterations.append(int((stats.target_calls - stats.plain_steps)[0, 0]))
        now = decoded.pace
    assert iterations[0] > 0 == iterations[1]


def test_drafts_beyond_the_ends_of_short_texts_are_not_counted_as_useful():
    """All tokens of texts of four are drafted: the iteration needs three drafts, and no more."""
    now, draft = Pace.start(Costs.by_formula(c=0.2)), TransformerDraft(WRITER)
    source, options = jnp.array([[5, 6, 7, EOS]]), {"gamma": now.largest, "max_decode_len": 20}
    for _ in range(12):
        arguments = WRITER, draft, source, NO_PROMPT, KEY, GREEDY
        now = speculative_decode(*arguments, **options, pace=now).pace
    assert int(now.plain_steps) == 0
    assert int(now.iterations) == 12
    assert 3 * 12 <= int(now.drafted) <= 4 * 12


def test_a_pace_of_other_costs_is_refused():
    with pytest.raises(InputError, match="gamma is 3 and the pace.s is 8"):
        decode(pace=Pace.start(Costs.by_formula(c=0.1)))


# The law


def on_and_off(gamma):
    """Makes a pace that refusals turn to plain steps, and each plain step to iterations."""
    return Pace.start(Costs.by_formula(c=0.6, largest=gamma), rest=1)


def decode_many_batches(draft, gamma):
    """Decodes the rows of ``laws``, each kind of them once in a batch, with a pace for each."""
    sources, prompts, steps = laws.rows()

    def decode(key):
        arguments = laws.target(), draft, sources, prompts, key, sampling(1.0)
        options = {"max_decode_len": laws.LENGTH, "max_decode_steps": steps}
        decoded = speculative_decode(*arguments, gamma=gamma, pace=on_and_off(gamma), **options)
        return decoded.tokens, decoded.scores, decoded.lengths, decoded.stats.plain_steps

    found = jax.vmap(decode)(jax.random.split(jax.random.key(11), laws.ROWS // len(laws.KINDS)))
    *rows, plain_steps = (leaf.reshape(laws.ROWS, *leaf.shape[2:]) for leaf in found)
    return jax.device_get(Decoded(*rows)), np.asarray(plain_steps)


def test_sampled_texts_follow_the_law_where_every_verdict_decides():
    decoded, plain_steps = decode_many_batches(TableDraft.create(seed=1, vocab_size=4), gamma=2)
    # The drafts of each batch decided on its plain steps.
    assert len(np.unique(plain_steps[:: len(laws.KINDS)])) > 2
    statistic, threshold = laws.chi_square(decoded, sampling(1.0))
    assert statistic < threshold


def test_coupled_the_text_depends_on_the_key_alone():
    target, other = (TableTarget.create(seed=seed, vocab_size=12) for seed in (0, 1))
    sources, settings = jnp.arange(8, dtype=jnp.int32).reshape(4, 2) + 2, sampling(1.0)
    arguments = (sources, jnp.zeros((4, 1), jnp.int32), KEY, settings)
    plain = autoregressive_decode(target, *arguments, coupled=True, max_decode_len=16)
    decoded = speculative_decode(
        target,
        TransformerDraft(other),
        *arguments,
        gamma=2,
        verifier=CoupledVerifier(),
        max_decode_len=16,
        pace=on_and_off(2),
    )
    np.testing.assert_array_equal(decoded.tokens, plain.tokens)
    iterations = decoded.stats.target_calls - decoded.stats.plain_steps
    assert 0 < np.sum(iterations) < np.sum(decoded.stats.target_calls)
    # A row that has ended takes no more plain steps.
    assert np.all(iterations * 2 >= decoded.stats.proposed)
