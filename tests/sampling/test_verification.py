"""Tests of the verifiers, enumerated exactly: the emitted tokens follow the target's law."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.sampling.distributions import gumbel_argmax, normalize, residual, sample
from spec_t5x.sampling.verification import (
    block_thresholds,
    block_verification,
    count_accepted,
    count_block_accepted,
    count_unrejected,
    emission_rows,
    mask_unproposed,
    matching_verification,
    node_verification,
    rejection_verification,
    token_verification,
)
from tests.older_jax import enable_x64
from tests.sampling.chi_square import follows

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Exact enumeration.
#
# A tree holds, for each depth i, the distributions after every prefix of i tokens, [V] * i + [V].
# The input of a verifier depends on the drafts x_1 … x_gamma and on the uniforms u_1 … u_gamma: the
# former are V ** gamma paths, each of probability prod q(x_i); the latter are cut at the numbers at
# which the verifier's decision changes, into 2 cells for each position, whose lengths are their
# probabilities. The verifier itself is called for each pair; the cuts are computed here, from the
# formulas.


def random_tree(rng, vocab, depth, zeros=0.0):
    """Makes distributions after every prefix; each token is excluded with odds ``zeros``."""
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
    """Makes trees of a target and of a draft."""
    target = random_tree(rng, vocab, gamma + 1, target_zeros)
    return target, random_tree(rng, vocab, gamma, draft_zeros)


def constant_tree(probs, depth):
    """Repeats a distribution after every prefix."""
    probs = np.asarray(probs, np.float64)
    return [np.broadcast_to(probs, (len(probs),) * i + probs.shape) for i in range(depth)]


def one_hot_tree(rng, vocab, depth):
    """Makes distributions with all mass on one token, another after every prefix."""
    return [np.eye(vocab)[rng.integers(vocab, size=(vocab,) * i)] for i in range(depth)]


def joint_law(tree):
    """Returns the probability of every sequence under the tree's conditionals."""
    return functools.reduce(lambda law, level: law[..., None] * level, tree)


def along_paths(tree, paths):
    """Returns the tree's distributions on the way of each path: ``[paths, depth, V]``."""
    levels = [
        np.broadcast_to(level[tuple(paths[:, :i].T)], (len(paths), level.shape[-1]))
        for i, level in enumerate(tree)
    ]
    return np.stack(levels, axis=1)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A verifier, taken apart for enumeration."""

    # (uniforms, tokens, draft_probs, target_probs) -> number of accepted drafts.
    count: Callable
    # (number accepted, tokens, draft_probs, target_probs) -> distribution that follows.
    emit: Callable
    # (tokens, draft_probs, target_probs) -> the uniforms below which drafts succeed.
    cuts: Callable


def at_tokens(tokens, probs):
    return probs[np.arange(len(tokens)), tokens]


def quotient(numerator, denominator):
    """Divides; the quotient is 0 for a token that was not proposed."""
    possible = denominator > 0
    return np.where(possible, numerator / np.where(possible, denominator, 1), 0)


def token_cuts(tokens, draft, target, lenience=1.0):
    ratios = quotient(at_tokens(tokens, target[:-1]), lenience * at_tokens(tokens, draft))
    return np.minimum(1, ratios)


def block_cuts(tokens, draft, target):
    """Returns the thresholds of arXiv 2403.10444, as written there."""
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


def test_block_verification_proposes_nothing_at_a_row_that_is_not_finite():
    """Rules may exclude every token after an end, whose probability must not depend on that."""
    draft, target = (np.full((rows, 2), 0.5, np.float32) for rows in (2, 3))
    draft[0], target[:2] = (0.9, 0.1), [(0.6, 0.4), (0.9, 0.1)]
    tokens = np.array([0, 1])
    ended, _ = block_thresholds(tokens, np.stack([draft[0], np.zeros(2)]), target)
    whole, _ = block_thresholds(tokens, draft, target)
    for row, expected in ((1, ended), (2, whole)):
        unsound = target.copy()
        unsound[row] = np.nan
        found, _ = block_thresholds(tokens, draft, unsound)
        np.testing.assert_array_equal(found[:row], expected[:row])
        assert 0 < found[0] < 1
        # The token of that row follows, so that its score shows it.
        assert count_block_accepted(np.zeros(2), found) == row


def test_block_verification_counts_a_draft_that_is_not_finite_as_not_proposed():
    draft, target = (np.full((rows, 2), 0.5, np.float32) for rows in (2, 3))
    draft[0], target[0] = (0.9, 0.1), (0.6, 0.4)
    expected = block_thresholds(np.array([0, 1]), np.stack([draft[0], np.zeros(2)]), target)
    draft[1] = np.nan
    found = block_thresholds(np.array([0, 1]), draft, target)
    np.testing.assert_array_equal(found[0], expected[0])
    assert 0 < found[0][0] < 1 and found[0][1] == 0


def count_block(uniforms, tokens, draft, target):
    return count_block_accepted(uniforms, block_thresholds(tokens, draft, target)[0])


def emit_after_tokens(num_accepted, tokens, draft, target):
    return residual(*emission_rows(num_accepted, draft, target))


def emit_after_block(num_accepted, tokens, draft, target):
    carried = block_thresholds(tokens, draft, target)[1]
    return normalize(residual(*emission_rows(num_accepted, draft, target, carried)))


def emit_from_the_target(num_accepted, tokens, draft, target):
    return target[num_accepted]


@functools.cache
def lenient(lenience):
    count, cuts = (functools.partial(f, lenience=lenience) for f in (count_accepted, token_cuts))
    return Rule(count, emit_after_tokens, cuts)


TOKEN = Rule(count_accepted, emit_after_tokens, token_cuts)
BLOCK = Rule(count_block, emit_after_block, block_cuts)
REJECTION = Rule(count_unrejected, emit_from_the_target, rejection_cuts)
RULES = {"token": TOKEN, "block": BLOCK, "rejection": REJECTION}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
VERIFICATIONS = (token_verification, block_verification, rejection_verification)
every_verification = pytest.mark.parametrize("verification", VERIFICATIONS, ids=RULES)


@functools.cache
def over_paths(rule):
    """Maps both functions over all paths, and all cells or all numbers of drafts."""
    over_cells = jax.vmap(rule.count, (0, None, None, None))
    over_counts = jax.vmap(rule.emit, (0, None, None, None))

    def of_paths(uniforms, counts, *arrays):
        emissions = jax.vmap(over_counts, (None, 0, 0, 0))(counts, *arrays)
        return jax.vmap(over_cells)(uniforms, *arrays), emissions

    return jax.jit(of_paths)


def cells_of(cuts, place):
    """Returns uniforms in the cells below and above each cut, and the odds of each cell."""
    cells = np.array(list(itertools.product(range(2), repeat=cuts.shape[-1])))
    cuts = cuts[..., None, :]
    lengths = np.where(cells, 1 - cuts, cuts)
    return np.where(cells, cuts, 0) + place * lengths, lengths.prod(axis=-1)


def emission_law(rule, target, draft, *, stop=len, dtype=np.float64, place=0.5):
    """Returns ``A[n][x_1 … x_n, y]``: probability of n accepted drafts, these, and then y.

    Args:
      rule: the verifier.
      target: tree of depth gamma + 1.
      draft: tree of depth gamma.
      stop: from a path to the number of its tokens that are proposed.
      dtype: type in which the verifier computes; the law is summed up in float64.
      place: position of each uniform in its cell, from 0 to 1.
    """
    gamma, vocab = len(draft), len(target[0])
    paths = np.array(list(itertools.product(range(vocab), repeat=gamma)))
    target_rows = along_paths(target, paths).astype(dtype)
    draft_rows = along_paths(draft, paths).astype(dtype)
    # Tokens behind the last proposed one are summed over: they change nothing.
    of_paths = np.prod([at_tokens(*path) for path in zip(paths, draft_rows, strict=True)], axis=1)
    proposed = np.array([stop(path) for path in paths.tolist()])[:, None, None]
    draft_rows = np.where(np.arange(gamma)[None, :, None] < proposed, draft_rows, 0)
    rows = (paths, draft_rows, target_rows)
    cuts = np.stack([rule.cuts(*row) for row in zip(*rows, strict=True)]).astype(np.float64)
    assert np.all((cuts >= 0) & (cuts <= 1 + 1e-6))
    uniforms, odds = cells_of(np.minimum(cuts, 1), place)
    weights = of_paths.astype(np.float64)[:, None] * odds

    # The number accepted in each cell, and the distribution after each path and each number of
    # accepted drafts: [paths, gamma + 1, V].
    arrays = jnp.asarray(uniforms, dtype), jnp.arange(gamma + 1), *map(jnp.asarray, rows)
    counts, emissions = over_paths(rule)(*arrays)
    assert emissions.dtype == dtype
    counts, emissions = np.asarray(counts), np.asarray(emissions, np.float64)
    law = [np.zeros((vocab,) * (n + 1)) for n in range(gamma + 1)]
    for n in range(gamma + 1):
        reached = np.sum(weights * (counts == n), axis=1)
        for path, emitted in zip(paths, reached[:, None] * emissions[:, n], strict=True):
            law[n][tuple(path[:n])] += emitted
    return law


def completed(law, target):
    """Returns the law of gamma + 1 tokens: those emitted, then the target's."""
    total = law[0]
    for emitted, conditionals in zip(law[1:], target[1:], strict=True):
        total = total[..., None] * conditionals + emitted
    return total


def deviation(rule, target, draft, **options):
    """Returns the largest difference between the law of gamma + 1 tokens and the target's."""
    law = completed(emission_law(rule, target, draft, **options), target)
    assert law.shape == (len(target[0]),) * len(target)
    return np.abs(law - joint_law(target)).max()


def expected_accepted(rule, target, draft):
    law = emission_law(rule, target, draft)
    return sum(n * level.sum() for n, level in enumerate(law))


ZEROS = [(0, 0), (0.4, 0), (0, 0.4), (0.4, 0.4)]
# Beside the cuts, on either side, and in the middle.
PLACES = (1e-9, 0.5, 1 - 1e-9)


@pytest.fixture
def x64():
    """Provides float64, for the exact law."""
    with enable_x64(True):
        yield


@every_rule
@pytest.mark.parametrize(("vocab", "gamma"), [(2, 1), (2, 4), (3, 3), (4, 2)])
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
    return next((i + 1 for i in range(1, len(path)) if path[i] == path[i - 1]), len(path))


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
    target = random_tree(np.random.default_rng(5), 3, 4, 0.2)
    law = emission_law(rule, target, target[:-1])
    assert [level.sum() for level in law[:-1]] == [0.0] * 3
    np.testing.assert_allclose(law[-1], joint_law(target), atol=1e-12)


@every_rule
def test_disjoint_distributions_accept_nothing_and_keep_the_law(x64, rule):
    target, draft = constant_tree([1, 0, 0], 4), constant_tree([0, 0.5, 0.5], 3)
    law = emission_law(rule, target, draft)
    np.testing.assert_allclose(law[0], target[0], atol=1e-12)
    np.testing.assert_allclose(completed(law, target), joint_law(target), atol=1e-12)


@every_rule
def test_the_law_holds_to_1e_5_in_float32(rule):
    pair = random_pair(np.random.default_rng(7), 3, 3, 0.3, 0.3)
    assert deviation(rule, *pair, dtype=np.float32) < 1e-5
    assert deviation(rule, *pair, dtype=np.float32, stop=after_a_zero) < 1e-5


# Numbers of accepted drafts


def test_the_papers_toy_pair_accepts_10_9ths_of_two_drafts_and_block_11_9ths(x64):
    target, draft = constant_tree([1 / 3, 2 / 3], 3), constant_tree([2 / 3, 1 / 3], 2)
    # sum min(p, q) = 2/3 at each position: 2/3 + (2/3) ** 2.
    assert expected_accepted(TOKEN, target, draft) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted(BLOCK, target, draft) == pytest.approx(11 / 9, abs=1e-12)
    # min q/p = 1/2 at each position: 1/2 + (1/2) ** 2.
    assert expected_accepted(REJECTION, target, draft) == pytest.approx(3 / 4, abs=1e-12)


def share_kept(of_target, of_draft):
    return of_target * np.min(of_draft / of_target, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("rule", "zeros", "at_each"),
    [(TOKEN, (0.2, 0.2), np.minimum), (REJECTION, (0, 0), share_kept)],
    ids=["corollary 3.6", "section A.2"],
)
def test_a_draft_is_accepted_with_the_papers_probability(x64, rule, zeros, at_each):
    """P(n >= i) is a sum over prefixes of the products of each token's kept probability."""
    target, draft = random_pair(np.random.default_rng(8), 3, 3, *zeros)
    expected, prefixes = 0.0, np.ones(())
    for of_target, of_draft in zip(target, draft, strict=False):
        prefixes = prefixes[..., None] * at_each(of_target, of_draft)
        expected += prefixes.sum()
    assert expected_accepted(rule, target, draft) == pytest.approx(expected, abs=1e-12)


def test_block_accepts_no_fewer_than_token_and_rejection_no_more(x64):
    rng = np.random.default_rng(0)
    for zeros in ZEROS * 15:
        pair = random_pair(rng, 3, 2, *zeros)
        block, token, rejection = (expected_accepted(r, *pair) for r in (BLOCK, TOKEN, REJECTION))
        assert rejection - 1e-9 <= token <= block + 1e-9


def test_token_and_block_are_the_same_for_one_hot_drafts(x64):
    rng = np.random.default_rng(14)
    target, draft = random_tree(rng, 3, 4, 0.2), one_hot_tree(rng, 3, 3)
    by_token, by_block = (emission_law(rule, target, draft) for rule in (TOKEN, BLOCK))
    for token_level, block_level in zip(by_token, by_block, strict=True):
        np.testing.assert_allclose(block_level, token_level, atol=1e-12)
    assert 0.1 < by_token[1].sum() < 0.9


# Lenience (section A.5)


@pytest.mark.parametrize("lenience", [1.0, 0.3])
def test_lenience_bends_the_law_as_section_a_5_says(x64, lenience):
    rng = np.random.default_rng(0)
    for zeros in ZEROS:
        target, draft = random_pair(rng, 4, 1, *zeros)
        rejected, accepted = emission_law(lenient(lenience), target, draft)
        found, p, q = rejected + accepted.sum(axis=1), target[0], draft[0]
        kept, excess = np.minimum(q, p / lenience), np.maximum(0, p - q)
        expected = kept + (1 - kept.sum()) * excess / excess.sum()
        np.testing.assert_allclose(found, expected, atol=1e-12)
        assert np.all(found <= p / lenience + 1e-12)
        assert accepted.sum() == pytest.approx(kept.sum(), abs=1e-12)


# The check must notice wrong verifiers.


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


@pytest.mark.parametrize("count", [rule.count for rule in RULES.values()], ids=RULES)
def test_corners_of_the_decisions(count):
    zero, half = jnp.zeros(1), jnp.full(4, 0.5)
    # A token that the target excludes is refused even at u = 0, where all others are accepted.
    draft_probs, target_probs = jnp.array([[0.5, 0.5]]), jnp.array([[1.0, 0.0], [0.5, 0.5]])
    assert count(zero, jnp.array([1]), draft_probs, target_probs) == 0
    assert count(zero, jnp.array([0]), draft_probs, target_probs) == 1
    # A token that the draft cannot have drawn is refused.
    draft_probs, target_probs = jnp.array([[1.0, 0.0], [0.5, 0.5]]), jnp.array([[0.5, 0.5]] * 3)
    assert count(jnp.zeros(2), jnp.array([1, 1]), draft_probs, target_probs) == 0
    # Nothing after a rejection is counted.
    sure = jnp.array([[0.0, 1.0]] * 4)
    target_probs = jnp.concatenate([sure, sure[:1]]).at[1].set(jnp.array([1.0, 0.0]))
    assert count(half, jnp.ones(4, jnp.int32), sure, target_probs) == 1


def test_block_thresholds_stay_numbers_at_the_smallest_probabilities():
    tiny = float(jnp.finfo(jnp.float32).tiny)
    # Refused, then a ratio of about 1e38 on top of it.
    draft_probs = jnp.array([[1.0, 0.0], [1.0, tiny], [1.0, tiny]])
    target_probs = jnp.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.5, 0.5]])
    thresholds, carried = block_thresholds(jnp.array([0, 1, 1]), draft_probs, target_probs)
    np.testing.assert_array_equal(thresholds, [0, 0, 0])
    np.testing.assert_array_equal(carried, [1, 0, 0, 0])


# Known tokens


@every_verification
def test_matching_verification_is_any_verification_of_a_one_hot_target(verification):
    vocab, gamma = 3, 2
    rng = np.random.default_rng(10)
    tokens = np.array(list(itertools.product(range(vocab), repeat=2 * gamma + 1)), np.int32)
    drafts, targets = tokens[:, :gamma], tokens[:, gamma:]
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
    keys = jax.random.split(jax.random.key(0), (2, len(drafts)))
    verify, one_hot = jax.jit(jax.vmap(verification)), jax.nn.one_hot(targets, vocab)
    for probs in of_drafts:
        masked = jax.vmap(mask_unproposed)(jnp.asarray(probs, jnp.float32), proposed)
        general = verify(*keys, jnp.asarray(drafts), masked, one_hot)
        np.testing.assert_array_equal(general.num_accepted, expected.num_accepted)
        np.testing.assert_array_equal(general.next_token, expected.next_token)


# Coupled: noise of infinitely many values, which cannot be enumerated


DRAWS = 40_000


@functools.cache
def sampled_trees():
    """Returns target and draft of 3 tokens, some excluded, for gamma 2."""
    return random_pair(np.random.default_rng(11), 3, 2, 0.2, 0.2)


def float32_trees(*trees):
    return jax.tree.map(lambda level: jnp.asarray(level, jnp.float32), trees)


def coupled_texts(fresh_noise):
    """Returns gamma + 1 tokens of many rows: emitted by one verdict, then by the target.

    With ``fresh_noise`` the target draws anew if it disagrees, which is wrong.
    """
    target, draft = float32_trees(*sampled_trees())
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


def counted(outcomes, shape):
    """Counts rows of tokens by their values."""
    counts = np.zeros(shape)
    np.add.at(counts, tuple(outcomes.T), 1)
    return counts


@pytest.mark.parametrize("fresh_noise", [False, True], ids=["the same noise", "fresh noise"])
def test_coupled_texts_follow_the_targets_law_if_the_noise_is_the_same(fresh_noise):
    law = joint_law(sampled_trees()[0])
    counts = counted(coupled_texts(fresh_noise), law.shape)
    assert not counts[law == 0].any()
    assert follows(counts, law) != fresh_noise


# Sampled


@pytest.mark.parametrize("misreports", [False, True])
@pytest.mark.parametrize(
    ("verification", "rule"),
    [
        *zip(VERIFICATIONS, RULES.values(), strict=True),
        (functools.partial(token_verification, lenience=0.5), lenient(0.5)),
    ],
    ids=[*RULES, "lenient"],
)
def test_sampled_verdicts_follow_the_enumerated_law(verification, rule, misreports):
    """The verdicts do not if the draft misreports the distributions that it draws from."""
    target, draft = sampled_trees()
    reported = [0.9 * level + 0.1 / 3 for level in draft] if misreports else draft
    trees = float32_trees(target, draft, reported)

    def draw(key):
        target, drawn_from, reported = trees
        draft_key, *keys = jax.random.split(key, 3)
        tokens = []
        for level, draw_key in zip(drawn_from, jax.random.split(draft_key, 2), strict=True):
            tokens.append(sample(draw_key, level[tuple(tokens)]))
        rows = [
            jnp.stack([level[tuple(tokens[:i])] for i, level in enumerate(tree)])
            for tree in (reported, target)
        ]
        return jnp.stack(tokens), verification(*keys, jnp.stack(tokens), *rows)

    keys = jax.random.split(jax.random.key(3), DRAWS)
    tokens, verdicts = jax.device_get(jax.jit(jax.vmap(draw))(keys))
    law = emission_law(rule, target, reported, dtype=np.float32)
    counts, texts = [], np.column_stack([tokens, verdicts.next_token])
    for n, level in enumerate(law):
        here = verdicts.num_accepted == n
        counts.append(counted(texts[here][:, [*range(n), -1]], level.shape).ravel())
    law = np.concatenate([level.ravel() for level in law])
    assert follows(np.concatenate(counts), law) != misreports


@every_verification
def test_decisions_and_emission_come_from_their_own_keys(verification):
    draft_probs = jnp.tile(jnp.array([0.4, 0.15, 0.15, 0.15, 0.15]), (3, 1))
    given = jnp.zeros(3, jnp.int32), draft_probs, jnp.full((4, 5), 0.2)
    keys = jax.random.split(jax.random.key(4), 64)
    one = jnp.stack([keys[0]] * 64)
    verify = jax.jit(jax.vmap(verification, (0, 0, None, None, None)))
    same_decisions, same_emission = verify(one, keys, *given), verify(keys, one, *given)
    assert len(np.unique(same_decisions.num_accepted)) == 1
    assert len(np.unique(same_decisions.next_token)) > 1
    assert len(np.unique(same_emission.num_accepted)) > 1


# Several drafts at one node
#
# Children are drawn one after the other, without replacement; each is tested against the residual
# of those before it. Uniforms are cut as above.


def ordered_draws(draft, num):
    """Returns every list of ``num`` children that may be drawn from ``draft``, with its odds.

    If the draft has nothing left, a token is added that it cannot draw.
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
    """Returns the acceptance of each child, by the rule as written in the reference."""
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
    """Returns the odds that each token is an accepted child, and that it is emitted: [V], [V].

    ``order`` arranges the children before they are verified; the others are ``emission_law``'s.
    """
    uniforms, children, weights = [], [], []
    for tokens, odds in ordered_draws(draft, num):
        tokens = order(tokens)
        in_cells, of_cells = cells_of(node_cuts(tokens, draft, target), place)
        uniforms.append(in_cells)
        children.append(np.tile(np.array(tokens, np.int32), (len(in_cells), 1)))
        weights.append(odds * of_cells)
    uniforms, children, weights = map(np.concatenate, (uniforms, children, weights))
    probs = jnp.asarray(draft, dtype), jnp.asarray(target, dtype)
    found = verify_nodes()(jnp.asarray(uniforms, dtype), jnp.asarray(children), *probs)
    chosen, emissions = np.asarray(found[0]), np.asarray(found[1], np.float64)
    accepted = chosen < num
    by_child = np.zeros(len(target))
    rows = np.flatnonzero(accepted)
    np.add.at(by_child, children[rows, chosen[rows]], weights[rows])
    return by_child, np.sum((weights * ~accepted)[:, None] * emissions, axis=0)


def random_node(rng, vocab, zeros=(0, 0)):
    """Makes a target's and a draft's distribution."""
    return [random_tree(rng, vocab, 1, each)[0] for each in zeros]


@pytest.mark.parametrize(("vocab", "num"), [(2, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_the_token_at_a_node_follows_the_targets_law_exactly(x64, vocab, num):
    rng = np.random.default_rng([vocab, num])
    for zeros, place in itertools.product(ZEROS, PLACES):
        target, draft = random_node(rng, vocab, zeros)
        law = sum(node_law(target, draft, num, place=place))
        np.testing.assert_allclose(law, target, atol=1e-12)


def test_one_child_is_token_verification_and_more_children_accept_more(x64):
    target, draft = random_node(np.random.default_rng(19), 4)
    accepted = [node_law(target, draft, num)[0] for num in (1, 2, 3)]
    np.testing.assert_allclose(accepted[0], np.minimum(target, draft), atol=1e-12)
    totals = [level.sum() for level in accepted]
    assert totals[0] < totals[1] < totals[2]


def test_children_in_another_order_than_they_were_drawn_in_break_the_law(x64):
    target, draft = random_node(np.random.default_rng(20), 4)

    def likeliest_first(tokens):
        return tuple(sorted(tokens, key=lambda token: -draft[token]))

    law = sum(node_law(target, draft, 2, order=likeliest_first))
    assert np.abs(law - target).max() > 0.01


def test_a_node_without_children_emits_from_the_target():
    target, draft = jnp.array([[0.25, 0.75], [0.5, 0.5]])
    chosen, emission = node_verification(jnp.zeros(0), jnp.zeros(0, jnp.int32), draft, target)
    assert chosen == 0
    np.testing.assert_array_equal(emission, target)


def test_a_child_that_the_target_excludes_is_refused_even_at_u_0():
    target, draft = jnp.array([[1.0, 0.0], [0.5, 0.5]])
    chosen, _ = node_verification(jnp.zeros(2), jnp.array([1, 0]), draft, target)
    assert chosen == 1


def test_a_child_that_the_draft_could_not_draw_counts_as_absent():
    target, draft = jnp.array([[0.4, 0.3, 0.3], [0.0, 0.9, 0.1]])
    for u in (0.2, 0.5):
        alone = node_verification(jnp.array([u]), jnp.array([1]), draft, target)
        chosen, emission = node_verification(jnp.array([u, u]), jnp.array([0, 1]), draft, target)
        assert chosen == 1 + alone[0]
        np.testing.assert_allclose(emission, alone[1], atol=1e-6)


def test_the_law_at_a_node_holds_to_1e_5_in_float32():
    rng = np.random.default_rng(21)
    for num in (2, 3):
        target, draft = random_node(rng, 4, (0.3, 0.3))
        law = sum(node_law(target, draft, num, dtype=np.float32))
        np.testing.assert_allclose(law, target, atol=1e-5)
