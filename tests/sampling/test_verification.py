"""The verifiers, enumerated exactly: the emitted tokens follow the target's law."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats

from spec_t5x.sampling.distributions import gumbel_argmax, normalize, residual, sample
from spec_t5x.sampling.verification import (
    Verdict,
    block_emission_rows,
    block_thresholds,
    block_verification,
    count_accepted,
    count_block_accepted,
    count_unrejected,
    emission_rows,
    lenient_argmax_verification,
    mask_unproposed,
    matching_verification,
    node_verification,
    rejection_acceptance,
    rejection_verification,
    token_verification,
)
from tests.older_jax import enable_x64

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Exact enumeration.
#
# A tree holds, for each depth i, the distributions after every prefix of i tokens,
# [V] * i + [V]. What a verifier is handed depends on the drafts x_1 … x_gamma and on
# the uniforms u_1 … u_gamma; the former are V ** gamma paths, each of probability
# prod q(x_i); the latter are cut where the verifier changes its mind, into 2 cells for
# each position, whose lengths are their probabilities. The verifier itself is called
# for each pair; the cuts are worked out here, from the formulas.


def random_tree(rng, vocab, depth, zeros=0.0):
    """Distributions after every prefix; each token is excluded with odds ``zeros``."""
    levels = []
    for i in range(depth):
        weights = rng.exponential(size=(vocab,) * (i + 1)) + 1e-3
        excluded = rng.random(weights.shape) < zeros
        # One token of each distribution is spared.
        spared = np.eye(vocab, dtype=bool)[rng.integers(vocab, size=weights.shape[:-1])]
        weights = np.where(excluded & ~spared, 0.0, weights)
        levels.append(weights / weights.sum(axis=-1, keepdims=True))
    return levels


def random_pair(rng, vocab, gamma, target_zeros=0.0, draft_zeros=0.0):
    """Trees of a target and of a draft."""
    return (
        random_tree(rng, vocab, gamma + 1, target_zeros),
        random_tree(rng, vocab, gamma, draft_zeros),
    )


def constant_tree(probs, depth):
    """The same distribution after every prefix."""
    probs = np.asarray(probs, np.float64)
    return [np.broadcast_to(probs, (len(probs),) * i + probs.shape) for i in range(depth)]


def one_hot_tree(rng, vocab, depth):
    """All mass on one token, another after every prefix."""
    return [np.eye(vocab)[rng.integers(vocab, size=(vocab,) * i)] for i in range(depth)]


def joint_law(tree):
    """Probability of every sequence under the tree's conditionals."""
    law = tree[0]
    for level in tree[1:]:
        law = law[..., None] * level
    return law


def along_paths(tree, paths):
    """``tree``'s distributions on the way of each path: ``[paths, depth, V]``."""
    return np.stack(
        [
            np.broadcast_to(level[tuple(paths[:, :i].T)], (len(paths), level.shape[-1]))
            for i, level in enumerate(tree)
        ],
        axis=1,
    )


@dataclasses.dataclass(frozen=True)
class Rule:
    """A verifier, taken apart into what can be enumerated."""

    # (uniforms, tokens, draft_probs, target_probs) -> number of accepted drafts.
    count: Callable
    # (number accepted, tokens, draft_probs, target_probs) -> distribution that follows.
    emit: Callable
    # (tokens, draft_probs, target_probs) -> the uniforms below which drafts succeed.
    cuts: Callable


def at_tokens(tokens, probs):
    return probs[np.arange(len(tokens)), tokens]


def quotient(numerator, denominator):
    """0 where nothing was proposed."""
    possible = denominator > 0
    return np.where(possible, numerator / np.where(possible, denominator, 1), 0)


def token_cuts(tokens, draft, target, lenience=1.0):
    ratios = quotient(at_tokens(tokens, target[:-1]), lenience * at_tokens(tokens, draft))
    return np.minimum(1, ratios)


def block_cuts(tokens, draft, target):
    """The thresholds of arXiv 2403.10444, as written there."""
    carried, cuts = 1.0, []
    for i, token in enumerate(tokens):
        if draft[i, token] == 0:
            return np.array(cuts + [0.0] * (len(tokens) - i))
        carried = min(1.0, carried * target[i, token] / draft[i, token])
        if i + 1 < len(tokens) and draft[i + 1].any():
            mass = np.maximum(carried * target[i + 1] - draft[i + 1], 0).sum()
            cuts.append(mass / (mass + 1 - carried) if mass + 1 - carried > 0 else 1.0)
        else:
            cuts.append(carried)
    return np.array(cuts)


def rejection_cuts(tokens, draft, target):
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.nanmax(target[:-1] / draft, axis=-1)
    return quotient(at_tokens(tokens, target[:-1]) / largest, at_tokens(tokens, draft))


def count_block(uniforms, tokens, draft, target):
    return count_block_accepted(uniforms, block_thresholds(tokens, draft, target)[0])


def emit_after_tokens(num_accepted, tokens, draft, target):
    return residual(*emission_rows(num_accepted, draft, target))


def emit_after_block(num_accepted, tokens, draft, target):
    carried = block_thresholds(tokens, draft, target)[1]
    return normalize(residual(*block_emission_rows(num_accepted, draft, target, carried)))


def emit_from_the_target(num_accepted, tokens, draft, target):
    return target[num_accepted]


TOKEN = Rule(count_accepted, emit_after_tokens, token_cuts)
BLOCK = Rule(count_block, emit_after_block, block_cuts)
REJECTION = Rule(count_unrejected, emit_from_the_target, rejection_cuts)
RULES = {"token": TOKEN, "block": BLOCK, "rejection": REJECTION}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def propose_everything(path):
    """How many of the path's tokens are proposed: all."""
    return len(path)


@functools.cache
def over_paths(rule):
    """Both functions over all paths, and all cells or all numbers of drafts."""
    over_cells = jax.vmap(rule.count, (0, None, None, None))
    over_counts = jax.vmap(rule.emit, (0, None, None, None))

    def of_paths(uniforms, counts, *arrays):
        return (
            jax.vmap(over_cells)(uniforms, *arrays),
            jax.vmap(over_counts, (None, 0, 0, 0))(counts, *arrays),
        )

    return jax.jit(of_paths)


def emission_law(
    rule,
    target,
    draft,
    *,
    stop=propose_everything,
    dtype=np.float64,
    place=0.5,
):
    """``A[n][x_1 … x_n, y]``: probability of n accepted drafts, these, and then y.

    Args:
      rule: the verifier.
      target: tree of depth gamma + 1.
      draft: tree of depth gamma.
      stop: from a path to the number of its tokens that are proposed.
      dtype: in which the verifier computes; the law is summed up in float64.
      place: where in its cell, from 0 to 1, each uniform lies.
    """
    gamma, vocab = len(draft), len(target[0])
    paths = np.array(list(itertools.product(range(vocab), repeat=gamma)))
    cells = np.array(list(itertools.product(range(2), repeat=gamma)))

    target_rows = along_paths(target, paths).astype(dtype)
    draft_rows = along_paths(draft, paths).astype(dtype)
    # Tokens behind the last proposed one are summed over: they change nothing.
    of_paths = np.prod([at_tokens(*path) for path in zip(paths, draft_rows, strict=True)], axis=1)
    proposed = np.array([stop(path) for path in paths.tolist()])[:, None, None]
    draft_rows = np.where(np.arange(gamma)[None, :, None] < proposed, draft_rows, 0)
    rows = list(zip(paths, draft_rows, target_rows, strict=True))
    cuts = np.stack([rule.cuts(*row) for row in rows]).astype(np.float64)
    assert np.all((cuts >= 0) & (cuts <= 1 + 1e-6))
    cuts = np.minimum(cuts, 1)[:, None, :]

    # [paths, cells, gamma]: below the cut, or above it.
    starts = np.where(cells[None], cuts, 0)
    lengths = np.where(cells[None], 1 - cuts, cuts)
    weights = of_paths.astype(np.float64)[:, None] * lengths.prod(axis=2)
    uniforms = (starts + place * lengths).astype(dtype)

    # How many are accepted in each cell, and of every path and every number of accepted
    # drafts, what follows: [paths, gamma + 1, V].
    counts, emissions = over_paths(rule)(
        jnp.asarray(uniforms),
        jnp.arange(gamma + 1),
        jnp.asarray(paths),
        jnp.asarray(draft_rows),
        jnp.asarray(target_rows),
    )
    assert emissions.dtype == dtype
    counts, emissions = np.asarray(counts), np.asarray(emissions, np.float64)
    law = [np.zeros((vocab,) * (n + 1)) for n in range(gamma + 1)]
    for n in range(gamma + 1):
        reached = np.sum(weights * (counts == n), axis=1)
        for path, emitted in zip(paths, reached[:, None] * emissions[:, n], strict=True):
            law[n][tuple(path[:n])] += emitted
    return law


def completed(law, target):
    """The law of gamma + 1 tokens: what was emitted, then the target's own."""
    total = law[0]
    for emitted, conditionals in zip(law[1:], target[1:], strict=True):
        total = total[..., None] * conditionals + emitted
    return total


def deviation(rule, target, draft, **options):
    """Largest difference between the law of gamma + 1 tokens and the target's."""
    law = completed(emission_law(rule, target, draft, **options), target)
    assert law.shape == (len(target[0]),) * len(target)
    return np.abs(law - joint_law(target)).max()


def expected_accepted(rule, target, draft):
    """Expected number of accepted drafts."""
    law = emission_law(rule, target, draft)
    return sum(n * level.sum() for n, level in enumerate(law))


# vocab, gamma: V ** gamma * 2 ** gamma calls of the verifier.
SIZES = [(2, 1), (2, 4), (3, 3), (4, 2)]
ZEROS = [(0, 0), (0.4, 0), (0, 0.4), (0.4, 0.4)]
# Beside the cuts, on either side, and in the middle.
PLACES = (1e-9, 0.5, 1 - 1e-9)


@pytest.fixture
def x64():
    """Float64, for the exact law."""
    with enable_x64(True):
        yield


@every_rule
@pytest.mark.parametrize(("vocab", "gamma"), SIZES)
def test_emitted_tokens_follow_the_targets_law_exactly(x64, rule, vocab, gamma):
    rng = np.random.default_rng([vocab, gamma])
    for zeros in ZEROS:
        pair = random_pair(rng, vocab, gamma, *zeros)
        for place in PLACES:
            assert deviation(rule, *pair, place=place) < 1e-12


def after_a_zero(path):
    """Proposes until a 0 was proposed."""
    return path.index(0) + 1 if 0 in path else len(path)


def after_two_of_a_kind(path):
    """Proposes nothing behind two equal tokens."""
    for i in range(1, len(path)):
        if path[i] == path[i - 1]:
            return i + 1
    return len(path)


def before_a_zero(path):
    """Looks at a token before it decides to propose it, which is not allowed."""
    return path.index(0) if 0 in path else len(path)


@every_rule
@pytest.mark.parametrize("stop", [0, 1, 2, after_a_zero, after_two_of_a_kind])
def test_the_law_is_exact_with_fewer_proposals_as_the_tokens_so_far_have_it(x64, rule, stop):
    rng = np.random.default_rng(9)
    for zeros in ZEROS:
        target, draft = random_pair(rng, 3, 3, *zeros)
        law = emission_law(rule, target, draft, stop=stop if callable(stop) else lambda path: stop)
        assert np.abs(completed(law, target) - joint_law(target)).max() < 1e-12
        if not callable(stop):
            assert sum(level.sum() for level in law[stop + 1 :]) == 0


@every_rule
def test_whether_to_propose_a_token_may_not_depend_on_the_token_itself(x64, rule):
    pair = random_pair(np.random.default_rng(12), 3, 3)
    assert deviation(rule, *pair, stop=before_a_zero) > 0.01


@pytest.mark.parametrize("rule", [TOKEN, BLOCK], ids=["token", "block"])
def test_equal_distributions_accept_everything_and_keep_the_law(x64, rule):
    vocab, gamma = 3, 3
    target = random_tree(np.random.default_rng(5), vocab, gamma + 1, 0.2)
    law = emission_law(rule, target, target[:-1])
    assert [level.sum() for level in law[:-1]] == [0.0] * gamma
    np.testing.assert_allclose(law[-1], joint_law(target), atol=1e-12)


@every_rule
def test_disjoint_distributions_accept_nothing_and_keep_the_law(x64, rule):
    vocab, gamma = 3, 3
    target = constant_tree(np.eye(vocab)[0], gamma + 1)
    draft = constant_tree((1 - np.eye(vocab)[0]) / (vocab - 1), gamma)
    law = emission_law(rule, target, draft)
    np.testing.assert_allclose(law[0], target[0], atol=1e-12)
    np.testing.assert_allclose(completed(law, target), joint_law(target), atol=1e-12)


@every_rule
def test_the_law_holds_to_1e_5_in_float32(rule):
    pair = random_pair(np.random.default_rng(7), 3, 3, 0.3, 0.3)
    assert deviation(rule, *pair, dtype=np.float32) < 1e-5
    assert deviation(rule, *pair, dtype=np.float32, stop=after_a_zero) < 1e-5


# How much is accepted


def test_the_papers_toy_pair_accepts_10_9ths_of_two_drafts_and_block_11_9ths(x64):
    target = constant_tree([1 / 3, 2 / 3], 3)
    draft = constant_tree([2 / 3, 1 / 3], 2)
    # sum min(p, q) = 2/3 at each position: 2/3 + (2/3) ** 2.
    assert expected_accepted(TOKEN, target, draft) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted(BLOCK, target, draft) == pytest.approx(11 / 9, abs=1e-12)
    # min q/p = 1/2 at each position: 1/2 + (1/2) ** 2.
    assert expected_accepted(REJECTION, target, draft) == pytest.approx(3 / 4, abs=1e-12)


def accepted_in_a_row(target, draft, at_each):
    """Expected number accepted where each position's tokens are kept with ``at_each``."""
    expected, prefixes = 0.0, np.ones(())
    for of_target, of_draft in zip(target, draft, strict=False):
        prefixes = prefixes[..., None] * at_each(of_target, of_draft)
        expected += prefixes.sum()
    return expected


def test_a_draft_is_accepted_with_the_probability_of_corollary_3_6(x64):
    pair = random_pair(np.random.default_rng(8), 3, 3, 0.2, 0.2)
    # P(n >= i) = sum over prefixes of prod min(p, q).
    expected = accepted_in_a_row(*pair, np.minimum)
    assert expected_accepted(TOKEN, *pair) == pytest.approx(expected, abs=1e-12)


def test_rejection_sampling_accepts_with_the_probability_of_section_a_2(x64):
    target, draft = random_pair(np.random.default_rng(8), 3, 3)

    def share(of_target, of_draft):
        return of_target * np.min(of_draft / of_target, axis=-1, keepdims=True)

    expected = accepted_in_a_row(target, draft, share)
    assert expected_accepted(REJECTION, target, draft) == pytest.approx(expected, abs=1e-12)


def test_rejection_acceptance_is_the_smallest_ratio_where_the_target_has_mass():
    target = jnp.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    draft = jnp.array([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5], [0.9, 0.1, 0.0], [1.0, 0.0, 0.0]])
    np.testing.assert_allclose(rejection_acceptance(target, draft), [0.5, 1, 0.1, 0], atol=1e-7)


def trees_of_weights(vocab, depth):
    """Small whole numbers as weights, zeros among them, one for each prefix and token."""
    rows = sum(vocab**i for i in range(depth))
    weights = st.lists(st.integers(0, 5), min_size=rows * vocab, max_size=rows * vocab)
    spared = st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows)

    def tree(weights, spared):
        weights = np.reshape(weights, (rows, vocab)) + np.eye(vocab)[spared]
        probs = weights / weights.sum(axis=1, keepdims=True)
        levels, start = [], 0
        for i in range(depth):
            levels.append(probs[start : start + vocab**i].reshape((vocab,) * (i + 1)))
            start += vocab**i
        return levels

    return st.builds(tree, weights, spared)


@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
@given(target=trees_of_weights(3, 3), draft=trees_of_weights(3, 2))
def test_block_accepts_no_fewer_than_token_and_rejection_no_more(target, draft):
    with enable_x64(True):
        block, token, rejection = (
            expected_accepted(rule, target, draft) for rule in (BLOCK, TOKEN, REJECTION)
        )
    assert rejection - 1e-9 <= token <= block + 1e-9


def test_token_and_block_are_the_same_for_one_hot_drafts(x64):
    rng = np.random.default_rng(14)
    target, draft = random_tree(rng, 3, 4, 0.2), one_hot_tree(rng, 3, 3)
    by_token, by_block = (emission_law(rule, target, draft) for rule in (TOKEN, BLOCK))
    for token_level, block_level in zip(by_token, by_block, strict=True):
        np.testing.assert_allclose(block_level, token_level, atol=1e-12)
    assert 0.1 < by_token[1].sum() < 0.9


# Lenience (A.5)


@pytest.mark.parametrize("lenience", [1.0, 0.3])
def test_lenience_bends_the_law_as_section_a_5_says(x64, lenience):
    rule, rng = lenient(lenience), np.random.default_rng(0)
    for zeros in ZEROS:
        target, draft = random_pair(rng, 4, 1, *zeros)
        rejected, accepted = emission_law(rule, target, draft)
        found = rejected + accepted.sum(axis=1)
        p, q = target[0], draft[0]
        kept = np.minimum(q, p / lenience)
        excess = np.maximum(0, p - q)
        np.testing.assert_allclose(
            found, kept + (1 - kept.sum()) * excess / excess.sum(), atol=1e-12
        )
        assert np.all(found <= p / lenience + 1e-12)
        assert accepted.sum() == pytest.approx(kept.sum(), abs=1e-12)


@functools.cache
def lenient(lenience):
    return Rule(
        functools.partial(count_accepted, lenience=lenience),
        emit_after_tokens,
        functools.partial(token_cuts, lenience=lenience),
    )


def test_lenient_argmax_accepts_from_l_times_the_largest_probability_on():
    rng = np.random.default_rng(15)
    logits = rng.normal(size=(2, 6)) * 1.5
    tokens = np.argmax(logits, axis=-1)
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    seen = set()
    for lenience in (1.0, 0.5, 0.3, 0.1, 0.01):
        verify = functools.partial(lenient_argmax_verification, lenience=lenience)
        verdict = jax.vmap(verify, (0, None, None, None))(
            jnp.arange(6)[:, None],
            jnp.asarray(logits, jnp.float32),
            jnp.asarray(tokens),
            jnp.int32(1),
        )
        accepted = probs[0] >= lenience * probs[0].max()
        np.testing.assert_array_equal(verdict.num_accepted, accepted)
        np.testing.assert_array_equal(verdict.next_token, np.where(accepted, tokens[1], tokens[0]))
        seen.add(int(accepted.sum()))
    assert len(seen) > 2


def test_lenient_argmax_accepts_on_the_boundary_and_only_what_was_proposed():
    logits = jnp.array([[0.0, jnp.log(0.5), -jnp.inf]] * 4)
    verify = functools.partial(lenient_argmax_verification, lenience=0.5)
    targets = jnp.zeros(4, jnp.int32)
    for tokens, proposed, accepted in [
        ([1, 0, 1], 3, 3),
        ([1, 0, 1], 2, 2),
        ([1, 0, 1], 0, 0),
        ([1, 2, 1], 3, 1),
    ]:
        verdict = verify(jnp.array(tokens), logits, targets, jnp.int32(proposed))
        assert int(verdict.num_accepted) == accepted
        assert int(verdict.next_token) == 0


# The check must notice what is wrong.


def count_block_by_the_first_failure(uniforms, tokens, draft, target):
    succeeded = uniforms < block_thresholds(tokens, draft, target)[0]
    return jnp.sum(jnp.cumprod(succeeded.astype(jnp.int32)))


WRONG = {
    "token emits p": Rule(count_accepted, emit_from_the_target, token_cuts),
    "lenient": lenient(0.5),
    "rejection emits the residual": Rule(count_unrejected, emit_after_tokens, rejection_cuts),
    "block with the token residual": Rule(count_block, emit_after_tokens, block_cuts),
    "block until the first failure": Rule(
        count_block_by_the_first_failure, emit_after_block, block_cuts
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_verifier_fails_the_enumeration(x64, wrong):
    pair = random_pair(np.random.default_rng(10), 3, 2)
    assert deviation(wrong, *pair) > 0.01


# Corners


def test_a_token_that_the_target_excludes_is_refused_even_at_u_equal_0():
    draft_probs = jnp.array([[0.5, 0.5]])
    target_probs = jnp.array([[1.0, 0.0], [0.5, 0.5]])
    zero = jnp.zeros(1)
    for count in (count_accepted, count_block, count_unrejected):
        assert count(zero, jnp.array([1]), draft_probs, target_probs) == 0
        # At u = 0 what the target allows at all is accepted.
        assert count(zero, jnp.array([0]), draft_probs, target_probs) == 1


def test_a_token_that_the_draft_cannot_have_drawn_is_refused():
    draft_probs = jnp.array([[1.0, 0.0], [0.5, 0.5]])
    target_probs = jnp.array([[0.5, 0.5]] * 3)
    tokens = jnp.array([1, 1])
    for count in (count_accepted, count_block, count_unrejected):
        assert count(jnp.zeros(2), tokens, draft_probs, target_probs) == 0


def test_block_thresholds_stay_numbers_at_the_smallest_probabilities():
    tiny = float(jnp.finfo(jnp.float32).tiny)
    # Refused, then a ratio of about 1e38 on top of it.
    draft_probs = jnp.array([[1.0, 0.0], [1.0, tiny], [1.0, tiny]])
    target_probs = jnp.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.5, 0.5]])
    thresholds, carried = block_thresholds(jnp.array([0, 1, 1]), draft_probs, target_probs)
    np.testing.assert_array_equal(thresholds, [0, 0, 0])
    np.testing.assert_array_equal(carried, [1, 0, 0, 0])


def test_what_follows_a_rejection_is_not_counted():
    sure = jnp.array([[0.0, 1.0]] * 4)
    target_probs = jnp.concatenate([sure, sure[:1]]).at[1].set(jnp.array([1.0, 0.0]))
    uniforms = jnp.full(4, 0.5)
    for count in (count_accepted, count_block, count_unrejected):
        assert count(uniforms, jnp.ones(4, jnp.int32), sure, target_probs) == 1


def test_the_last_success_of_a_block_counts():
    thresholds = jnp.full(4, 0.5)
    for uniforms, accepted in [
        ([0.1, 0.1, 0.1, 0.1], 4),
        ([0.9, 0.9, 0.1, 0.9], 3),
        ([0.1, 0.9, 0.9, 0.5], 1),
        ([0.9, 0.9, 0.9, 0.9], 0),
    ]:
        assert count_block_accepted(jnp.array(uniforms), thresholds) == accepted


@pytest.mark.parametrize(
    "verification", [token_verification, block_verification, rejection_verification]
)
def test_nothing_proposed_emits_from_the_target(verification):
    target_probs = jnp.array([[0.25, 0.0, 0.75]])
    keys = jax.random.split(jax.random.key(0), 2000)

    def verify(key, emit_key):
        return verification(key, emit_key, jnp.zeros(0, jnp.int32), jnp.zeros((0, 3)), target_probs)

    verdicts = jax.jit(jax.vmap(verify))(keys, keys[::-1])
    np.testing.assert_array_equal(verdicts.num_accepted, 0)
    counts = np.bincount(verdicts.next_token, minlength=3)
    assert counts[1] == 0
    assert stats.binomtest(int(counts[0]), 2000, 0.25).pvalue > 1e-6


def test_what_was_not_proposed_is_masked():
    probs = jnp.full((3, 2), 0.5)
    for proposed in range(4):
        masked = np.asarray(mask_unproposed(probs, jnp.int32(proposed)))
        np.testing.assert_array_equal(masked[:proposed], 0.5)
        np.testing.assert_array_equal(masked[proposed:], 0.0)


# Where the tokens of both are known


@pytest.mark.parametrize(
    "verification", [token_verification, block_verification, rejection_verification]
)
def test_matching_verification_is_any_verification_of_a_one_hot_target(verification):
    vocab, gamma = 3, 2
    rng = np.random.default_rng(10)
    drafts = np.array(list(itertools.product(range(vocab), repeat=gamma)), np.int32)
    targets = np.array(list(itertools.product(range(vocab), repeat=gamma + 1)), np.int32)
    drafts, targets = np.repeat(drafts, len(targets), axis=0), np.tile(targets, (len(drafts), 1))
    shape = (len(drafts), gamma, vocab)
    # Any draft that may have drawn these tokens: one-hot, uniform and random ones.
    of_drafts = [
        np.eye(vocab)[drafts],
        np.full(shape, 1 / vocab),
        rng.dirichlet(np.ones(vocab), size=shape[:2]),
    ]
    proposed = jnp.asarray(rng.integers(gamma + 1, size=len(drafts)))
    expected = jax.vmap(matching_verification)(jnp.asarray(drafts), jnp.asarray(targets), proposed)
    assert len(np.unique(expected.num_accepted)) == gamma + 1
    keys, emit_keys = jax.random.split(jax.random.key(0), (2, len(drafts)))
    verify = jax.jit(jax.vmap(verification))
    for probs in of_drafts:
        masked = jax.vmap(mask_unproposed)(jnp.asarray(probs, jnp.float32), proposed)
        general = verify(
            keys, emit_keys, jnp.asarray(drafts), masked, jax.nn.one_hot(targets, vocab)
        )
        np.testing.assert_array_equal(general.num_accepted, expected.num_accepted)
        np.testing.assert_array_equal(general.next_token, expected.next_token)


def test_matching_verification_by_hand():
    """Drafts that agree with the target's choices 5 7 9 3, and do not.

    1. 5 7 9: all agree, then the target's 3.
    2. 5 8 9: 8 is not 7, which replaces it; the 9 behind it does not count.
    3. 4 7 9: refused at once.
    4. 5 7 9, of which only 5 7 were proposed: then the target's 9.
    """
    drafts = jnp.array([[5, 7, 9], [5, 8, 9], [4, 7, 9], [5, 7, 9]])
    targets = jnp.tile(jnp.array([5, 7, 9, 3]), (4, 1))
    verdict = jax.vmap(matching_verification)(drafts, targets, jnp.array([3, 3, 3, 2]))
    np.testing.assert_array_equal(verdict.num_accepted, [3, 1, 0, 2])
    np.testing.assert_array_equal(verdict.next_token, [3, 7, 5, 9])


# Coupled: noise of infinitely many values, which cannot be enumerated


DRAWS = 40_000


@functools.cache
def sampled_trees():
    """Target and draft of 3 tokens, some excluded, for gamma 2."""
    return random_pair(np.random.default_rng(11), 3, 2, 0.2, 0.2)


def coupled_texts(fresh_noise):
    """gamma + 1 tokens of many rows: emitted by one verdict, then by the target.

    Args:
      fresh_noise: whether the target draws anew where it disagrees (which is wrong).
    """
    target, draft = jax.tree.map(lambda level: jnp.asarray(level, jnp.float32), sampled_trees())
    gamma = len(draft)

    def row(key):
        gumbels = jax.random.gumbel(key, (gamma + 1, 3))
        other = jax.random.gumbel(jax.random.fold_in(key, 1), (gamma + 1, 3))
        drafts, choices = [], []
        for i in range(gamma + 1):
            prefix = tuple(drafts)
            choices.append(gumbel_argmax(target[i][prefix], gumbels[i]))
            if i < gamma:
                drafts.append(gumbel_argmax(draft[i][prefix], gumbels[i]))
                anew = gumbel_argmax(target[i][prefix], other[i])
                if fresh_noise:
                    choices[i] = jnp.where(drafts[i] == choices[i], choices[i], anew)
        verdict = matching_verification(jnp.stack(drafts), jnp.stack(choices), jnp.int32(gamma))
        text = []
        for i in range(gamma + 1):
            own = gumbel_argmax(target[i][tuple(text)], gumbels[i])
            known = [*drafts, jnp.int32(0)][i]
            token = jnp.where(i < verdict.num_accepted, known, own)
            text.append(jnp.where(i == verdict.num_accepted, verdict.next_token, token))
        return jnp.stack(text)

    return np.asarray(jax.jit(jax.vmap(row))(jax.random.split(jax.random.key(5), DRAWS)))


@pytest.mark.parametrize("fresh_noise", [False, True], ids=["the same noise", "fresh noise"])
def test_coupled_texts_follow_the_targets_law_if_the_noise_is_the_same(fresh_noise):
    law = joint_law(sampled_trees()[0])
    counts = np.zeros_like(law)
    np.add.at(counts, tuple(coupled_texts(fresh_noise).T), 1)
    possible = law > 0
    assert counts[~possible].sum() == 0
    expected = law[possible] * DRAWS
    statistic = np.sum((counts[possible] - expected) ** 2 / expected)
    # Passed by chance once in a million times.
    threshold = stats.chi2.ppf(1 - 1e-6, possible.sum() - 1)
    assert (statistic < threshold) != fresh_noise


# Sampled


def sampled_verdicts(verification, key, target, drawn_from, reported):
    """Draws drafts along a tree and verifies them: tokens, and the verdicts.

    Args:
      verification: like ``token_verification``.
      key: of all draws.
      target: tree of depth gamma + 1.
      drawn_from: tree of depth gamma, which the drafts are drawn from.
      reported: tree of depth gamma, which the verifier is told they are drawn from.
    """
    gamma = len(reported)
    trees = jax.tree.map(
        lambda level: jnp.asarray(level, jnp.float32), (target, drawn_from, reported)
    )

    def draw(key):
        target, drawn_from, reported = trees
        draft_key, accept_key, emit_key = jax.random.split(key, 3)
        tokens = []
        for i, draw_key in enumerate(jax.random.split(draft_key, gamma)):
            tokens.append(sample(draw_key, drawn_from[i][tuple(tokens)]))
        rows = [
            jnp.stack([level[tuple(tokens[:i])] for i, level in enumerate(tree)])
            for tree in (reported, target)
        ]
        return jnp.stack(tokens), verification(accept_key, emit_key, jnp.stack(tokens), *rows)

    keys = jax.random.split(key, DRAWS)
    return jax.device_get(jax.jit(jax.vmap(draw))(keys))


def chi_square(tokens, verdicts: Verdict, law):
    """The statistic of (n, x_1 … x_n, y) against ``law``, and its threshold.

    The threshold is passed by chance once in a million times. An outcome of
    probability zero makes the statistic infinite.
    """
    statistic, outcomes = 0.0, 0
    for n, level in enumerate(law):
        here = verdicts.num_accepted == n
        counts = np.zeros_like(level)
        np.add.at(counts, (*tokens[here, :n].T, verdicts.next_token[here]), 1)
        expected = level * DRAWS
        possible = level > 1e-12
        # What float32 lets through where the exact law is zero is rarer than any draw.
        if counts[~possible].any():
            return np.inf, 0.0
        statistic += np.sum((counts - expected)[possible] ** 2 / expected[possible])
        outcomes += possible.sum()
    return statistic, stats.chi2.ppf(1 - 1e-6, outcomes - 1)


@pytest.mark.parametrize(
    ("verification", "rule"),
    [
        (token_verification, TOKEN),
        (block_verification, BLOCK),
        (rejection_verification, REJECTION),
        (functools.partial(token_verification, lenience=0.5), lenient(0.5)),
    ],
    ids=["token", "block", "rejection", "lenient"],
)
def test_sampled_verdicts_follow_the_enumerated_law(verification, rule):
    target, draft = sampled_trees()
    tokens, verdicts = sampled_verdicts(verification, jax.random.key(3), target, draft, draft)
    law = emission_law(rule, target, draft, dtype=np.float32)
    statistic, threshold = chi_square(tokens, verdicts, law)
    assert statistic < threshold


@pytest.mark.parametrize(
    ("verification", "rule"),
    [(token_verification, TOKEN), (block_verification, BLOCK)],
    ids=["token", "block"],
)
def test_a_draft_that_misreports_its_probabilities_fails_the_chi_square(verification, rule):
    target, draft = sampled_trees()
    reported = [0.9 * level + 0.1 / 3 for level in draft]
    tokens, verdicts = sampled_verdicts(verification, jax.random.key(3), target, draft, reported)
    law = emission_law(rule, target, reported, dtype=np.float32)
    statistic, threshold = chi_square(tokens, verdicts, law)
    assert statistic > threshold


@pytest.mark.parametrize(
    "verification", [token_verification, block_verification, rejection_verification]
)
def test_decisions_and_emission_come_from_their_own_keys(verification):
    target_probs = jnp.full((4, 5), 0.2)
    draft_probs = jnp.tile(jnp.array([0.4, 0.15, 0.15, 0.15, 0.15]), (3, 1))
    tokens = jnp.zeros(3, jnp.int32)
    keys = jax.random.split(jax.random.key(4), 64)
    one = jnp.stack([keys[0]] * 64)
    verify = jax.jit(jax.vmap(verification, (0, 0, None, None, None)))
    same_decisions = verify(one, keys, tokens, draft_probs, target_probs)
    assert len(np.unique(same_decisions.num_accepted)) == 1
    assert len(np.unique(same_decisions.next_token)) > 1
    same_emission = verify(keys, one, tokens, draft_probs, target_probs)
    assert len(np.unique(same_emission.num_accepted)) > 1


# Several drafts at one node
#
# Children are drawn one after the other, without replacement; each is tested against
# what is left of the target. Uniforms are cut as above.


def ordered_draws(draft, num):
    """Every list of ``num`` children that may be drawn from ``draft``: (list, odds).

    What is drawn when the draft has nothing left are tokens that it cannot draw.
    """
    lists = [((), 1.0)]
    for _ in range(num):
        longer = []
        for children, odds in lists:
            left = draft.copy()
            left[list(children)] = 0
            if left.sum() > 0:
                longer += [
                    ((*children, token), odds * left[token] / left.sum())
                    for token in np.flatnonzero(left).tolist()
                ]
            else:
                impossible = next(t for t in range(len(draft)) if t not in children)
                longer.append(((*children, impossible), odds))
        lists = longer
    return lists


def node_cuts(children, draft, target):
    """Acceptance of each child, as the rule is written in the reference."""
    cuts, p, q = [], target.copy(), draft.copy()
    for child in children:
        if q[child] == 0:
            cuts.append(0.0)
            continue
        cuts.append(min(1.0, p[child] / q[child]))
        excess = np.maximum(p - q, 0)
        if excess.sum() > 0:
            p = excess / excess.sum()
        q[child] = 0
        q = q / q.sum() if q.sum() > 0 else q
    return np.array(cuts)


@functools.cache
def verify_nodes():
    return jax.jit(jax.vmap(node_verification, (0, 0, None, None)))


def node_law(target, draft, num, *, dtype=np.float64, place=0.5, order=tuple):
    """Odds that each child's token is accepted, and that each token is emitted: [V], [V].

    Args:
      target: the target's distribution.
      draft: what the children are drawn from.
      num: how many children.
      dtype: in which the verifier computes.
      place: where in its cell, from 0 to 1, each uniform lies.
      order: arranges the children before they are verified.
    """
    draws = [(order(tokens), odds) for tokens, odds in ordered_draws(draft, num)]
    cells = np.array(list(itertools.product(range(2), repeat=num))).reshape(-1, num)
    uniforms, children, weights = [], [], []
    for tokens, odds in draws:
        cuts = node_cuts(tokens, draft, target)[None, :]
        lengths = np.where(cells, 1 - cuts, cuts)
        uniforms.append(np.where(cells, cuts, 0) + place * lengths)
        children.append(np.tile(np.array(tokens, np.int32), (len(cells), 1)))
        weights.append(odds * lengths.prod(axis=1))
    children, weights = np.concatenate(children), np.concatenate(weights)
    chosen, emissions = verify_nodes()(
        jnp.asarray(np.concatenate(uniforms), dtype),
        jnp.asarray(children),
        jnp.asarray(draft, dtype),
        jnp.asarray(target, dtype),
    )
    chosen, emissions = np.asarray(chosen), np.asarray(emissions, np.float64)
    accepted = chosen < num
    by_child = np.zeros(len(target))
    rows = np.flatnonzero(accepted)
    np.add.at(by_child, children[rows, chosen[rows]], weights[rows])
    return by_child, np.sum((weights * ~accepted)[:, None] * emissions, axis=0)


@pytest.mark.parametrize(("vocab", "num"), [(2, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_the_token_at_a_node_follows_the_targets_law_exactly(x64, vocab, num):
    rng = np.random.default_rng([vocab, num])
    for zeros in ZEROS:
        for place in PLACES:
            (target,), (draft,) = (
                random_tree(rng, vocab, 1, zeros[0]),
                random_tree(rng, vocab, 1, zeros[1]),
            )
            accepted, emitted = node_law(target, draft, num, place=place)
            np.testing.assert_allclose(accepted + emitted, target, atol=1e-12)


def test_one_child_is_token_verification_and_more_children_accept_more(x64):
    rng = np.random.default_rng(19)
    (target,), (draft,) = random_tree(rng, 4, 1), random_tree(rng, 4, 1)
    accepted = [node_law(target, draft, num)[0] for num in (1, 2, 3)]
    np.testing.assert_allclose(accepted[0], np.minimum(target, draft), atol=1e-12)
    totals = [level.sum() for level in accepted]
    assert totals[0] < totals[1] < totals[2]


def test_children_in_another_order_than_they_were_drawn_in_break_the_law(x64):
    rng = np.random.default_rng(20)
    (target,), (draft,) = random_tree(rng, 4, 1), random_tree(rng, 4, 1)

    def likeliest_first(tokens):
        return tuple(sorted(tokens, key=lambda token: -draft[token]))

    accepted, emitted = node_law(target, draft, 2, order=likeliest_first)
    assert np.abs(accepted + emitted - target).max() > 0.01


def test_a_node_without_children_emits_from_the_target():
    target = jnp.array([0.25, 0.75])
    chosen, emission = node_verification(
        jnp.zeros(0), jnp.zeros(0, jnp.int32), jnp.array([0.5, 0.5]), target
    )
    assert chosen == 0
    np.testing.assert_array_equal(emission, target)


def chain_law(target, draft, nums, **options):
    """Law of the tokens along the tree: down accepted children, then the target's own.

    Args:
      target: tree of distributions, deeper than ``nums`` by one.
      draft: tree of distributions that children are drawn from.
      nums: children of a node at each depth.
      **options: ``node_law``'s.
    """
    vocab = len(target[0])
    # Odds of each text whose nodes were all descended through accepted children.
    descended = np.ones(())
    law = np.zeros(())
    for depth, num in enumerate(nums):
        accepted = np.zeros((vocab,) * (depth + 1))
        emitted = np.zeros_like(accepted)
        for prefix in itertools.product(range(vocab), repeat=depth):
            of_node = node_law(target[depth][prefix], draft[depth][prefix], num, **options)
            accepted[prefix], emitted[prefix] = descended[prefix] * np.stack(of_node)
        # Texts that left the tree go on with the target's own distribution.
        law = (law[..., None] * target[depth] if depth else 0) + emitted
        descended = accepted
    return (law + descended)[..., None] * target[len(nums)]


@pytest.mark.parametrize(("vocab", "nums"), [(2, (2, 1, 2)), (3, (2, 3)), (3, (1, 2, 1))])
def test_tokens_down_a_chain_of_nodes_follow_the_targets_law_exactly(x64, vocab, nums):
    rng = np.random.default_rng([vocab, *nums])
    for zeros in ((0, 0), (0.3, 0.3)):
        target, draft = random_pair(rng, vocab, len(nums), *zeros)
        np.testing.assert_allclose(chain_law(target, draft, nums), joint_law(target), atol=1e-12)


def test_the_law_down_a_chain_of_nodes_holds_to_1e_5_in_float32():
    target, draft = random_pair(np.random.default_rng(21), 3, 2, 0.3, 0.3)
    law = chain_law(target, draft, (2, 3), dtype=np.float32)
    np.testing.assert_allclose(law, joint_law(target), atol=1e-5)
