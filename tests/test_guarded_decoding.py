"""Decoding under a guard: the same text and law, at a bounded cost, whatever the draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.autoregressive import autoregressive_decode
from spec_t5x.decoding import speculative_decode, speculative_steps
from spec_t5x.distributions import sampling
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.guard import guard
from spec_t5x.outputs import Decoded
from spec_t5x.testing import laws
from spec_t5x.testing.toy_models import ConstantDraft, StubTarget, TableDraft, TableTarget
from spec_t5x.verifiers import CoupledVerifier

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1
GREEDY = sampling(0.0)
KEY = jax.random.key(0)
NO_PROMPT = jnp.zeros((1, 1), jnp.int32)


def writes_the_source(sources, prefixes):
    """Token t of the text is token t of the source, from t = 1; then 0."""
    width = prefixes.shape[1]
    copied = jnp.pad(sources, ((0, 0), (0, width)))[:, :width]
    return 9.0 * jax.nn.one_hot(copied, 16)


def says_2_at_first(sources, prefixes):
    """Wrong about the first six tokens, right about the others."""
    wrong = jnp.arange(prefixes.shape[1]) < 6
    right = writes_the_source(sources, prefixes)
    return jnp.where(wrong[None, :, None], 9.0 * jax.nn.one_hot(2, 16), right)


WRITER = StubTarget(writes_the_source, 16)
LATE = TransformerDraft(StubTarget(says_2_at_first, 16))
SOURCE = jnp.array([[5, 6, 7, 8, 9, 4, 3, 5, 6, 7, 8, 9, 4, 3, 5, 6, EOS]])
TRACE = {"gamma": 3, "max_decode_len": 20}


def trace_guard():
    """Iterations cost 3 * .2 + 1.4 = 2: a refused one loses 1; the prefill takes .5."""
    return guard(c=0.2, verification=1.4, prefill=0.5, start=1.5, tolerance=0.4, limit=9.0)


def by_hand(arguments=(WRITER, LATE, SOURCE, NO_PROMPT, KEY, GREEDY)):
    return speculative_decode(*arguments, **TRACE, guard=trace_guard())


def test_a_text_under_a_guard_by_hand():
    """Target 5 6 7 8 9 4 | 3 5 6 7 8 9 4 3 5 6 EOS; the draft is wrong before the bar.

    The first token may lose 1.5, the prefill takes .5 of it and one refusal 1: 5 is
    written by an iteration. Its tolerance of .4 and those of the next tokens pay back the
    1.5; the plain steps from 6 on bring nothing, nothing, .1, .5, .9, and 1.3 at the
    seventh token, 3. Two calls over four tokens would make the draft ready for the next
    iteration, at .28 each: 1.56 with its 1 are not covered before the next, 5, at 1.7.
    That leaves 1.14. Then 6 7 8 9 and 4 3 5 6 are accepted or emitted, and EOS.
    """
    decoded = by_hand()
    np.testing.assert_array_equal(decoded.tokens[0, 0, :17], SOURCE[0])
    stats = decoded.stats
    assert int(stats.plain_steps[0, 0]) == 7
    assert int(stats.iterations[0, 0]) == 4
    np.testing.assert_array_equal(stats.proposed, [[12]])
    np.testing.assert_array_equal(stats.accepted, [[7]])
    np.testing.assert_array_equal(stats.accepted_by_position, [[[3, 2, 2]]])
    # The 9 and the 5 after whole proposals were not verified, nor anything after EOS.
    np.testing.assert_array_equal(stats.verified_by_position, [[[4, 2, 2]]])
    np.testing.assert_allclose(stats.block_efficiency, [[17 / 11]])
    # 1.14, two iterations that gain 2 and 1.6, and the last one, which loses 1 and earns .4.
    assert float(decoded.guard.balance) == pytest.approx(1.14 + 2 * (2 + 1.6) - 0.6, abs=1e-4)


def test_stepping_under_a_guard_gives_the_same_trace():
    def run():
        decoded = yield from speculative_steps(
            WRITER, LATE, SOURCE, NO_PROMPT, KEY, GREEDY, **TRACE, guard=trace_guard()
        )
        results.append(decoded)

    results = []
    steps = list(run())
    plain = [int(step.num_proposed[0]) == 0 for step in steps]
    assert plain == [False, *[True] * 7, False, False, False]
    assert [step.appended[0, : step.num_appended[0]].tolist() for step in steps[:3]] == [
        [5],
        [6],
        [7],
    ]
    expected = by_hand()
    for found, wanted in zip(jax.tree.leaves(results[0]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_balance_of_one_batch_is_the_next_ones_start():
    """A hopeless draft gets two tries in the first text, and none in the second."""
    draft = ConstantDraft(jnp.int32(2), 16)
    now, iterations = guard(c=0.0, verification=1.9, start=2.0), []
    for _ in range(2):
        decoded = speculative_decode(
            WRITER, draft, SOURCE, NO_PROMPT, KEY, GREEDY, **TRACE, guard=now
        )
        iterations.append(int(decoded.stats.iterations[0, 0]))
        now = decoded.guard
    assert iterations == [2, 0]


def test_without_a_guard_there_is_none_afterwards():
    decoded = speculative_decode(WRITER, LATE, SOURCE, NO_PROMPT, KEY, GREEDY, **TRACE)
    assert decoded.guard is None
    assert int(decoded.stats.plain_steps[0, 0]) == 0


# The law


def on_and_off():
    """One refusal forbids the next iteration, one acceptance allows it."""
    return guard(c=0.1, verification=1.2, start=0.3, tolerance=0.1)


def decode_many_batches(draft, gamma):
    """The rows of ``laws``, each kind of them once in a batch, with a guard for each."""
    kinds, batches = len(laws.KINDS), laws.ROWS // len(laws.KINDS)
    prompts = np.zeros((kinds, 3), np.int32)
    for row, (_, prompt, _) in enumerate(laws.KINDS):
        prompts[row, 1 : 1 + len(prompt)] = prompt
    sources, _, steps = (np.array(column, object) for column in zip(*laws.KINDS, strict=True))

    def decode(key):
        decoded = speculative_decode(
            laws.target(),
            draft,
            jnp.asarray(np.stack(sources), jnp.int32),
            jnp.asarray(prompts),
            key,
            sampling(1.0),
            gamma=gamma,
            max_decode_len=laws.LENGTH,
            max_decode_steps=jnp.asarray(steps.astype(np.int32)),
            guard=on_and_off(),
        )
        return decoded.tokens, decoded.scores, decoded.lengths, decoded.stats.plain_steps

    found = jax.vmap(decode)(jax.random.split(jax.random.key(11), batches))
    *rows, plain_steps = (leaf.reshape(laws.ROWS, *leaf.shape[2:]) for leaf in found)
    return jax.device_get(Decoded(*rows)), np.asarray(plain_steps)


def test_sampled_texts_follow_the_law_where_every_verdict_decides():
    decoded, plain_steps = decode_many_batches(TableDraft.create(seed=1, vocab_size=4), gamma=2)
    # Batches went different ways, which their own drafts decided.
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
        guard=on_and_off(),
    )
    np.testing.assert_array_equal(decoded.tokens, plain.tokens)
    assert 0 < np.sum(decoded.stats.plain_steps) < np.sum(decoded.stats.target_calls)
