"""The verifiers, enumerated exactly: the emitted tokens follow the target's law."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_t5x.distributions import residual, sample
from spec_t5x.verification import (
    Verdict,
    count_accepted,
    emission_probs,
    greedy_verification,
    token_verification,
)

# Exact enumeration.
#
# A tree holds, for each depth i, the distributions after every prefix of i tokens,
# [V] * i + [V]. What the verifier is handed depends on the drafts x_1 … x_gamma and
# on the uniforms u_1 … u_gamma; the former are V ** gamma paths, each of probability
# prod q(x_i); the latter are cut where any of the rules under test can change its
# mind, at min(1, p/q) and at min(1, q/p), into 3 cells for each position, whose
# lengths are their probabilities. The verifier itself is called for each pair.


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


def constant_tree(probs, depth):
    """The same distribution after every prefix."""
    probs = np.asarray(probs, np.float64)
    return [np.broadcast_to(probs, (len(probs),) * i + probs.shape) for i in range(depth)]


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


@functools.cache
def over_paths(count, emit, jitted):
    """Both functions over all paths, and all cells or all numbers of drafts."""
    over_cells = jax.vmap(count, (0, None, None, None))
    over_counts = jax.vmap(emit, (0, None, None))
    functions = jax.vmap(over_cells), jax.vmap(over_counts, (None, 0, 0))
    return tuple(map(jax.jit, functions)) if jitted else functions


def emission_law(target, draft, count, emit, *, dtype=np.float64, place=0.5, jitted=True):
    """``A[n][x_1 … x_n, y]``: probability of n accepted drafts, these, and then y.

    Args:
      target: tree of depth gamma + 1.
      draft: tree of depth gamma.
      count: like ``count_accepted``.
      emit: like ``emission_probs``.
      dtype: in which the verifier computes; the law is summed up in float64.
      place: where in its cell, from 0 to 1, each uniform lies.
      jitted: whether to compile ``count`` and ``emit``.
    """
    gamma, vocab = len(draft), len(target[0])
    paths = np.array(list(itertools.product(range(vocab), repeat=gamma)))
    cells = np.array(list(itertools.product(range(3), repeat=gamma)))

    target_rows = along_paths(target, paths).astype(dtype)
    draft_rows = along_paths(draft, paths).astype(dtype)
    of_target = np.take_along_axis(target_rows[:, :-1], paths[..., None], 2)[..., 0]
    of_draft = np.take_along_axis(draft_rows, paths[..., None], 2)[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        # A path of probability zero (q = 0) weighs nothing, wherever it is cut.
        cuts = [of_target / of_draft, of_draft / of_target]
    cuts = [np.clip(np.nan_to_num(cut, nan=1.0, posinf=1.0), 0, 1) for cut in cuts]
    edges = np.sort(np.stack([0 * cuts[0], *cuts, 0 * cuts[0] + 1], axis=-1), axis=-1)

    # [paths, cells, gamma]: each position's cell, where it starts and how long it is.
    index = np.broadcast_to(cells, (len(paths), *cells.shape))
    starts, lengths = (
        np.take_along_axis(np.swapaxes(values, 1, 2), index, axis=1)
        for values in (
            edges[..., :-1].astype(np.float64),
            np.diff(edges.astype(np.float64)),
        )
    )
    weights = of_draft.astype(np.float64).prod(1)[:, None] * lengths.prod(axis=2)
    uniforms = (starts + place * lengths).astype(dtype)

    counting, emitting = over_paths(count, emit, jitted)
    arrays = jnp.asarray(draft_rows), jnp.asarray(target_rows)
    counts = np.asarray(counting(jnp.asarray(uniforms), jnp.asarray(paths), *arrays))
    # Of every path and every number of accepted drafts: [paths, gamma + 1, V].
    emissions = np.asarray(emitting(jnp.arange(gamma + 1), *arrays), np.float64)

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


def deviation(target, draft, count=count_accepted, emit=emission_probs, **options):
    """Largest difference between the law of gamma + 1 tokens and the target's."""
    law = completed(emission_law(target, draft, count, emit, **options), target)
    assert law.shape == (len(target[0]),) * len(target)
    return np.abs(law - joint_law(target)).max()


# vocab, gamma: V ** gamma * 3 ** gamma calls of the verifier.
SIZES = [
    (2, 1),
    (2, 2),
    (2, 3),
    (2, 4),
    (2, 5),
    (3, 1),
    (3, 2),
    (3, 3),
    (3, 4),
    (4, 1),
    (4, 2),
]
# Beside the cuts, on either side, and in the middle.
PLACES = (1e-9, 0.5, 1 - 1e-9)


@pytest.fixture
def x64():
    """Float64, for the exact law."""
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("vocab", "gamma"), SIZES)
def test_emitted_tokens_follow_the_targets_law_exactly(x64, vocab, gamma):
    rng = np.random.default_rng([vocab, gamma])
    for target_zeros, draft_zeros in [(0, 0), (0.4, 0), (0, 0.4), (0.4, 0.4)]:
        target = random_tree(rng, vocab, gamma + 1, target_zeros)
        draft = random_tree(rng, vocab, gamma, draft_zeros)
        for place in PLACES:
            assert deviation(target, draft, place=place) < 1e-12


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 5), (3, 3)])
def test_equal_distributions_accept_everything_and_keep_the_law(x64, vocab, gamma):
    target = random_tree(np.random.default_rng(5), vocab, gamma + 1, 0.2)
    law = emission_law(target, target[:-1], count_accepted, emission_probs)
    assert [level.sum() for level in law[:-1]] == [0.0] * gamma
    np.testing.assert_allclose(law[-1], joint_law(target), atol=1e-12)


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 3), (3, 2)])
def test_disjoint_distributions_accept_nothing_and_keep_the_law(x64, vocab, gamma):
    target = constant_tree(np.eye(vocab)[0], gamma + 1)
    draft = constant_tree((1 - np.eye(vocab)[0]) / (vocab - 1), gamma)
    law = emission_law(target, draft, count_accepted, emission_probs)
    np.testing.assert_allclose(law[0], target[0], atol=1e-12)
    np.testing.assert_allclose(completed(law, target), joint_law(target), atol=1e-12)


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 2), (3, 2)])
def test_the_law_is_exact_without_compilation(x64, vocab, gamma):
    rng = np.random.default_rng(6)
    target, draft = (
        random_tree(rng, vocab, gamma + 1, 0.3),
        random_tree(rng, vocab, gamma, 0.3),
    )
    assert deviation(target, draft, jitted=False) < 1e-12


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 4), (3, 3), (4, 2)])
def test_the_law_holds_to_1e_5_in_float32(vocab, gamma, jitted):
    rng = np.random.default_rng(7)
    target, draft = (
        random_tree(rng, vocab, gamma + 1, 0.3),
        random_tree(rng, vocab, gamma, 0.3),
    )
    assert deviation(target, draft, dtype=np.float32, jitted=jitted) < 1e-5


def expected_accepted(target, draft):
    """Expected number of accepted drafts."""
    law = emission_law(target, draft, count_accepted, emission_probs)
    return sum(n * level.sum() for n, level in enumerate(law))


def test_the_papers_toy_pair_accepts_10_9ths_drafts_of_two(x64):
    target = constant_tree([1 / 3, 2 / 3], 3)
    draft = constant_tree([2 / 3, 1 / 3], 2)
    # sum min(p, q) = 2/3 at each position: 2/3 + (2/3) ** 2.
    assert expected_accepted(target, draft) == pytest.approx(10 / 9, abs=1e-12)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_a_draft_is_accepted_with_the_probability_of_corollary_3_6(x64, gamma):
    rng = np.random.default_rng(8)
    target, draft = random_tree(rng, 3, gamma + 1, 0.2), random_tree(rng, 3, gamma, 0.2)
    # P(n >= i) = sum over prefixes of prod min(p, q).
    expected, prefixes = 0.0, np.ones(())
    for of_target, of_draft in zip(target, draft, strict=False):
        prefixes = prefixes[..., None] * np.minimum(of_target, of_draft)
        expected += prefixes.sum()
    assert expected_accepted(target, draft) == pytest.approx(expected, abs=1e-12)


# The check must notice what is wrong.


def emit_from_the_target(num_accepted, draft_probs, target_probs):
    return target_probs[num_accepted]


def emit_residual_of_the_draft(num_accepted, draft_probs, target_probs):
    gamma = draft_probs.shape[0]
    swapped = residual(draft_probs[num_accepted % gamma], target_probs[num_accepted])
    return jnp.where(num_accepted < gamma, swapped, target_probs[gamma])


def accept_with_p_and_q_swapped(uniforms, draft_tokens, draft_probs, target_probs):
    at = jnp.arange(len(draft_tokens)), draft_tokens
    accepted = uniforms * target_probs[at] <= draft_probs[at]
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32)))


def accept_a_little_too_often(uniforms, draft_tokens, draft_probs, target_probs):
    return count_accepted(0.9 * uniforms, draft_tokens, draft_probs, target_probs)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"emit": emit_from_the_target}, 0.5),
        ({"emit": emit_residual_of_the_draft}, 0.5),
        ({"count": accept_with_p_and_q_swapped}, 0.5),
        # Wrong beside the cuts only.
        ({"count": accept_a_little_too_often}, PLACES[0]),
    ],
    ids=["emits p", "emits norm(q - p)", "p and q swapped", "lenient"],
)
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 2), (3, 2)])
def test_a_wrong_verifier_fails_the_enumeration(x64, vocab, gamma, wrong, place):
    rng = np.random.default_rng(9)
    target, draft = random_tree(rng, vocab, gamma + 1), random_tree(rng, vocab, gamma)
    assert deviation(target, draft, place=place) < 1e-12
    assert deviation(target, draft, place=place, **wrong) > 0.01


# Corners


def test_a_token_that_the_target_excludes_is_refused_even_at_u_equal_0():
    draft_probs = jnp.array([[0.5, 0.5]])
    target_probs = jnp.array([[1.0, 0.0], [0.5, 0.5]])
    zero = jnp.zeros(1)
    assert count_accepted(zero, jnp.array([1]), draft_probs, target_probs) == 0
    # At u = 0 what the target allows at all is accepted.
    assert count_accepted(zero, jnp.array([0]), draft_probs, target_probs) == 1


def test_a_draft_that_understates_its_probability_is_accepted():
    # q = 0 for a drawn token can only come from rounding: u q < p needs no division.
    draft_probs = jnp.array([[1.0, 0.0]])
    target_probs = jnp.array([[0.5, 0.5], [0.5, 0.5]])
    accepted = count_accepted(jnp.array([0.999]), jnp.array([1]), draft_probs, target_probs)
    assert accepted == 1


def test_what_follows_a_rejection_is_not_counted():
    sure = jnp.array([[0.0, 1.0]] * 4)
    target_probs = jnp.concatenate([sure, sure[:1]]).at[1].set(jnp.array([1.0, 0.0]))
    uniforms = jnp.full(4, 0.5)
    assert count_accepted(uniforms, jnp.ones(4, jnp.int32), sure, target_probs) == 1


def test_nothing_proposed_emits_from_the_target():
    target_probs = jnp.array([[0.25, 0.75]])
    nothing = jnp.zeros((0, 2))
    assert count_accepted(jnp.zeros(0), jnp.zeros(0, jnp.int32), nothing, target_probs) == 0
    np.testing.assert_array_equal(emission_probs(jnp.int32(0), nothing, target_probs), [0.25, 0.75])


# Greedy


def random_rows(rng, rows, vocab):
    return rng.dirichlet(np.ones(vocab), size=rows)


@pytest.mark.parametrize(("vocab", "gamma"), [(2, 1), (2, 3), (3, 2), (2, 4)])
def test_greedy_verification_is_token_verification_of_a_one_hot_target(vocab, gamma):
    rng = np.random.default_rng(10)
    drafts = np.array(list(itertools.product(range(vocab), repeat=gamma)), np.int32)
    targets = np.array(list(itertools.product(range(vocab), repeat=gamma + 1)), np.int32)
    drafts, targets = (
        np.repeat(drafts, len(targets), axis=0),
        np.tile(targets, (len(drafts), 1)),
    )
    # Any draft that may have drawn these tokens: one-hot, uniform and random ones.
    shape = (len(drafts), gamma, vocab)
    of_drafts = [
        np.eye(vocab)[drafts],
        np.full(shape, 1 / vocab),
        random_rows(rng, len(drafts) * gamma, vocab).reshape(shape),
    ]
    greedy = jax.vmap(greedy_verification)(jnp.asarray(drafts), jnp.asarray(targets))
    keys, emit_keys = jax.random.split(jax.random.key(0), (2, len(drafts)))
    verify = jax.jit(jax.vmap(token_verification))
    for probs in of_drafts:
        general = verify(
            keys,
            emit_keys,
            jnp.asarray(drafts),
            jnp.asarray(probs, jnp.float32),
            jax.nn.one_hot(targets, vocab),
        )
        np.testing.assert_array_equal(general.num_accepted, greedy.num_accepted)
        np.testing.assert_array_equal(general.next_token, greedy.next_token)


def test_greedy_verification_by_hand():
    """Drafts that agree with the target's choices 5 7 9 3, and do not.

    1. 5 7 9: all agree, then the target's 3.
    2. 5 8 9: 8 is not 7, which replaces it; the 9 behind it does not count.
    3. 4 7 9: refused at once.
    """
    drafts = jnp.array([[5, 7, 9], [5, 8, 9], [4, 7, 9]])
    targets = jnp.tile(jnp.array([5, 7, 9, 3]), (3, 1))
    verdict = jax.vmap(greedy_verification)(drafts, targets)
    np.testing.assert_array_equal(verdict.num_accepted, [3, 1, 0])
    np.testing.assert_array_equal(verdict.next_token, [3, 7, 5])


# Sampled

DRAWS = 100_000


def sampled_verdicts(key, target, drawn_from, reported, jitted):
    """Draws drafts along a tree and verifies them: tokens, and the verdicts.

    Args:
      key: of all draws.
      target: tree of depth gamma + 1.
      drawn_from: tree of depth gamma, which the drafts are drawn from.
      reported: tree of depth gamma, which the verifier is told they are drawn from.
      jitted: whether to compile.
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
        return jnp.stack(tokens), token_verification(accept_key, emit_key, jnp.stack(tokens), *rows)

    draws = jax.vmap(draw)
    keys = jax.random.split(key, DRAWS)
    return jax.device_get((jax.jit(draws) if jitted else draws)(keys))


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
        if counts[~possible].any():
            return np.inf, 0.0
        statistic += np.sum((counts - expected)[possible] ** 2 / expected[possible])
        outcomes += possible.sum()
    return statistic, stats.chi2.ppf(1 - 1e-6, outcomes - 1)


@functools.cache
def sampled_trees():
    """Target and draft of 3 tokens, some excluded, for gamma 2."""
    rng = np.random.default_rng(11)
    return random_tree(rng, 3, 3, 0.2), random_tree(rng, 3, 2, 0.2)


@pytest.mark.parametrize("jitted", [False, True])
def test_sampled_verdicts_follow_the_enumerated_law(jitted):
    target, draft = sampled_trees()
    tokens, verdicts = sampled_verdicts(jax.random.key(3), target, draft, draft, jitted)
    law = emission_law(target, draft, count_accepted, emission_probs, dtype=np.float32)
    statistic, threshold = chi_square(tokens, verdicts, law)
    assert statistic < threshold


def test_a_draft_that_misreports_its_probabilities_fails_the_chi_square():
    target, draft = sampled_trees()
    reported = [0.9 * level + 0.1 / 3 for level in draft]
    tokens, verdicts = sampled_verdicts(jax.random.key(3), target, draft, reported, True)
    law = emission_law(target, reported, count_accepted, emission_probs, dtype=np.float32)
    statistic, threshold = chi_square(tokens, verdicts, law)
    assert statistic > threshold


def test_decisions_and_emission_come_from_their_own_keys():
    target_probs = jnp.full((4, 5), 0.2)
    draft_probs = jnp.tile(jnp.array([0.6, 0.1, 0.1, 0.1, 0.1]), (3, 1))
    tokens = jnp.zeros(3, jnp.int32)
    keys = jax.random.split(jax.random.key(4), 64)
    one, verify = (
        keys[0],
        jax.jit(jax.vmap(token_verification, (0, 0, None, None, None))),
    )
    same_decisions = verify(jnp.stack([one] * 64), keys, tokens, draft_probs, target_probs)
    assert len(np.unique(same_decisions.num_accepted)) == 1
    assert len(np.unique(same_decisions.next_token)) > 1
    same_emission = verify(keys, jnp.stack([one] * 64), tokens, draft_probs, target_probs)
    assert len(np.unique(same_emission.num_accepted)) > 1
