"""Verifiers as the loops use them: names, errors, batches, and a new one."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x import registry
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Proposal
from spec_t5x.options import GenerateOptions
from spec_t5x.sampling.distributions import MIN_TEMPERATURE, sampling, standardize
from spec_t5x.sampling.draws import Draws, RowStream, purpose_keys
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.sampling.verification import block_verification, token_verification
from spec_t5x.verifiers import (
    BlockVerifier,
    CoupledVerifier,
    RejectionVerifier,
    TokenVerifier,
    TreeVerifier,
    Verifier,
    largest_limit,
    verifier,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, GAMMA, ROWS = 5, 3, 64
SAMPLED = sampling(1.0)
VERIFIERS = registry.names("verifier")
# Verifiers of one draft for each position.
ROW_VERIFIERS = ("token", "block", "coupled", "rejection")
STREAM = RowStream(jax.random.split(jax.random.key(0), ROWS))
LENGTHS = jnp.arange(ROWS, dtype=jnp.int32) % 7


@functools.cache
def batch(coupled=False, greedy=False):
    """Makes a proposal for each row, with all counts, and the target's logits."""
    settings = sampling(0.0) if greedy else SAMPLED
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(ROWS, GAMMA + 1, VOCAB)), jnp.float32)
    noise = jnp.asarray(rng.normal(size=(ROWS, GAMMA, VOCAB)), jnp.float32)
    draft_probs = standardize(logits[:, :-1] + 0.7 * noise, settings)
    draws = Draws(STREAM, LENGTHS, coupled=coupled)
    tokens = []
    for i in range(GAMMA):
        token, draws = draws.next(draft_probs[:, i], settings)
        tokens.append(token)
    counts = jnp.asarray(rng.integers(GAMMA + 1, size=ROWS), jnp.int32)
    return Proposal(jnp.stack(tokens, axis=1), draft_probs, counts=counts), logits


def verify(chosen, proposal, logits, settings=SAMPLED):
    """Returns the verdicts of a compiled program."""
    probs = standardize(logits, settings)
    return jax.jit(chosen)(STREAM, LENGTHS, proposal, logits, probs, settings)


# Names


def test_every_verifier_has_its_name():
    for name, kind in registry.find_all("verifier").items():
        assert type(verifier(name)) is kind
        # Static arguments: those of one setting share a program.
        assert hash(verifier(name)) == hash(verifier(name, lenience=1.0))
    assert verifier() == BlockVerifier()
    assert verifier("token", lenience=0.5) == TokenVerifier(0.5) != TokenVerifier(0.25)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("greedy", {}, "verifier is 'greedy': choose one of " + ", ".join(VERIFIERS)),
        *(("token", {"lenience": bad}, f"lenience is {bad}: ") for bad in (0.0, 1.5, float("nan"))),
        *(
            (name, {"lenience": 0.5}, f"lenience is 0.5 and verifier '{name}': use 1, or verifier")
            for name in VERIFIERS
            if name != "token"
        ),
        *(("token", {"lenience": bad}, f"lenience is {bad!r}: give a") for bad in ("x", True)),
        ("tree", {"widths": 3}, "widths is 3: give a list, as in (3,)"),
        ("multi", {"widths": (2, 2)}, "widths are (2, 2): multi takes one number"),
        ("block", {"widths": (2,)}, "widths are (2,) and verifier 'block': use multi or tree"),
    ],
)
def test_what_a_verifier_cannot_be_is_refused(name, settings, message):
    with pytest.raises(InputError) as error:
        verifier(name, **settings)
    assert message in str(error.value)


# Batches


def test_each_row_is_verified_by_itself_with_its_own_keys():
    proposal, logits = batch()
    verdict = verify(BlockVerifier(), proposal, logits)
    emit_keys, accept_keys, _ = purpose_keys(STREAM, LENGTHS)
    one = jax.jit(block_verification)
    for row in range(0, ROWS, 7):
        probs = proposal.probs[row].at[proposal.counts[row] :].set(0.0)
        keys, target_probs = (accept_keys[row], emit_keys[row]), standardize(logits, SAMPLED)[row]
        alone = one(*keys, proposal.tokens[row], probs, target_probs)
        assert alone.num_accepted == verdict.num_accepted[row]
        assert alone.next_token == verdict.next_token[row]


@pytest.mark.parametrize("name", ROW_VERIFIERS)
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_nothing_beyond_the_count_is_accepted_or_looked_at(name, greedy):
    settings = sampling(0.0) if greedy else SAMPLED
    proposal, logits = batch(verifier(name).coupled, greedy)
    verdict = verify(verifier(name), proposal, logits, settings)
    assert np.all(verdict.num_accepted <= proposal.counts)
    # Some rows keep all they proposed, and some do not.
    kept_all = np.asarray(verdict.num_accepted == proposal.counts)[np.asarray(proposal.counts) > 0]
    assert 0 < kept_all.sum() < len(kept_all)
    beyond = jnp.arange(GAMMA)[None, :] >= proposal.counts[:, None]
    other = Proposal(
        jnp.where(beyond, (proposal.tokens + 1) % VOCAB, proposal.tokens),
        jnp.where(beyond[..., None], 1 / VOCAB, proposal.probs),
        counts=proposal.counts,
    )
    again = verify(verifier(name), other, logits, settings)
    np.testing.assert_array_equal(again.num_accepted, verdict.num_accepted)
    np.testing.assert_array_equal(again.next_token, verdict.next_token)


def test_at_temperature_0_every_lossless_verifier_matches_the_argmax():
    proposal, logits = batch(greedy=True)
    choices = np.argmax(logits, axis=-1)
    agrees = np.asarray(proposal.tokens) == choices[:, :-1]
    agrees &= np.arange(GAMMA)[None, :] < np.asarray(proposal.counts)[:, None]
    accepted = np.cumprod(agrees, axis=1).sum(axis=1)
    for name in ROW_VERIFIERS:
        verdict = verify(verifier(name), proposal, logits, sampling(0.0))
        np.testing.assert_array_equal(verdict.num_accepted, accepted)
        np.testing.assert_array_equal(verdict.next_token, choices[np.arange(ROWS), accepted])


def cold_and_warm(rows):
    """Makes temperatures that are 0, 1, the largest that is argmax, 1, and so on."""
    numbers = np.arange(rows)
    return np.where(numbers % 2, 1.0, MIN_TEMPERATURE * (numbers % 4 > 0))


@pytest.mark.parametrize(
    "chosen", [TokenVerifier(), TokenVerifier(0.4), BlockVerifier(), RejectionVerifier()]
)
def test_a_row_at_temperature_0_is_greedy_beside_sampled_ones(chosen):
    proposal, logits = batch(greedy=True)
    # Some proposals are not the argmax.
    proposal = proposal.replace(tokens=proposal.tokens.at[::3, 0].add(1) % VOCAB)
    proposal = proposal.replace(probs=jax.nn.one_hot(proposal.tokens, VOCAB))
    alone = verify(chosen, proposal, logits, sampling(0.0))
    mixed = verify(chosen, proposal, logits, sampling(cold_and_warm(ROWS)))
    np.testing.assert_array_equal(mixed.num_accepted[::2], alone.num_accepted[::2])
    np.testing.assert_array_equal(mixed.next_token[::2], alone.next_token[::2])


def test_lenience_accepts_more_when_sampling_and_at_temperature_0():
    for settings, greedy in ((SAMPLED, False), (sampling(0.0), True)):
        proposal, logits = batch(greedy=greedy)
        accepted = [
            int(verify(TokenVerifier(lenience), proposal, logits, settings).num_accepted.sum())
            for lenience in (1.0, 0.3, 0.05)
        ]
        assert accepted[0] < accepted[1] < accepted[2]


@pytest.mark.parametrize(
    ("ranks", "proposed", "lenience", "accepted"),
    [
        # On the boundary.
        ([1, 0, 1], 3, 0.5, 3),
        ([1, 0, 1], 3, 0.51, 0),
        ([1, 0, 1], 2, 0.3, 2),
        ([1, 0, 1], 0, 0.3, 0),
        ([1, 2, 1], 3, 0.01, 1),
        ([0, 1, 0], 3, 1.0, 1),
    ],
)
def test_lenient_argmax_accepts_from_l_times_the_largest_probability_on(
    ranks, proposed, lenience, accepted
):
    """Position i ranks token i first, the next one, of half its probability, and one of none."""
    ranked = np.array([0.0, np.log(0.5), -np.inf], np.float32)
    logits = jnp.asarray([[np.roll(ranked, i) for i in range(4)]])
    tokens = jnp.asarray((np.array([ranks]) + np.arange(3)) % 3, jnp.int32)
    proposal = Proposal(tokens, counts=jnp.array([proposed], jnp.int32))
    verdict = TokenVerifier(lenience).verify_argmax(proposal, logits)
    assert (int(verdict.num_accepted[0]), int(verdict.next_token[0])) == (accepted, accepted % 3)


def test_coupled_verification_emits_what_the_noise_chooses_from_the_target():
    proposal, logits = batch(coupled=True)
    verdict = verify(CoupledVerifier(), proposal, logits)
    noise = np.stack([STREAM.gumbels(LENGTHS + i, VOCAB) for i in range(GAMMA + 1)], axis=1)
    choices = np.argmax(np.asarray(jax.nn.log_softmax(logits)) + noise, axis=-1)
    for row, n in enumerate(verdict.num_accepted.tolist()):
        assert proposal.tokens[row, :n].tolist() == choices[row, :n].tolist()
        assert verdict.next_token[row] == choices[row, n]
        assert n == proposal.counts[row] or proposal.tokens[row, n] != choices[row, n]
    given = proposal, logits, standardize(logits, SAMPLED), SAMPLED, verdict
    is_accepted = np.arange(GAMMA)[None, :] < np.asarray(verdict.num_accepted)[:, None]
    np.testing.assert_array_equal(CoupledVerifier().chances(*given), is_accepted)


@pytest.mark.parametrize(
    "chosen",
    [
        *(TokenVerifier(), TokenVerifier(0.3), BlockVerifier(), RejectionVerifier()),
        CoupledVerifier(),
    ],
    ids=repr,
)
def test_chances_are_how_often_a_draft_is_accepted(chosen):
    """Tokens are drawn or certain, in rows of any temperature; coupled chances have bounds."""
    rows = 20_000
    stream = RowStream(jax.random.split(jax.random.key(1), rows))
    lengths = jnp.zeros(rows, jnp.int32)
    # After the draft the target has another distribution.
    after = [-2.0, 0.2, -0.4, 3.0, 0.6]
    logits = jnp.tile(jnp.array([[[1.0, 0.6, 0.2, -0.4, -2.0], after]]), (rows, 1, 1))
    draft_probs = jnp.tile(jnp.array([[0.1, 0.3, 0.3, 0.2, 0.1]]), (rows, 1))
    draws = Draws(stream if chosen.coupled else RowStream(stream.at(lengths, 3)[2]), lengths)
    tokens, _ = draws.replace(coupled=chosen.coupled).next(draft_probs, SAMPLED)
    drawn = Proposal(tokens[:, None], draft_probs[:, None])
    certain = Proposal(jnp.arange(rows)[:, None] // 4 % 2)
    mixed = sampling(cold_and_warm(rows))

    @jax.jit
    def compare(proposal, settings):
        given = (proposal, logits, standardize(logits, settings), settings)
        verdict = chosen(stream, lengths, *given)
        chances = (each.chances(*given, verdict)[:, 0] for each in (chosen, TokenVerifier()))
        return verdict.num_accepted, *chances

    for proposal, settings in itertools.product((drawn, certain), (sampling(0.0), mixed)):
        results = compare(proposal, settings)
        for kind in (slice(0, None, 2), slice(1, None, 2)):
            accepted, chances, strict = (np.mean(each[kind]) for each in results)
            bounds = (strict / (2 - strict), strict) if chosen.coupled else (chances, chances)
            # Five standard deviations of a count of 10,000 draws.
            assert bounds[0] - 0.025 < accepted < bounds[1] + 0.025
    # Strict verification accepts another share.
    if chosen not in (TokenVerifier(), BlockVerifier()):
        _, chances, strict = compare(drawn, mixed)
        assert abs(np.mean(chances[1::2]) - np.mean(strict[1::2])) > 0.05


def test_at_temperature_0_a_chance_is_the_drafts_probability_of_the_argmax():
    proposal, logits = batch()
    settings = sampling(0.0)
    given = proposal, logits, standardize(logits, settings), settings
    best = np.argmax(logits, axis=-1)[:, :-1, None]
    expected = np.take_along_axis(np.asarray(proposal.probs), best, axis=-1)[..., 0]
    for chosen in (TokenVerifier(), BlockVerifier(), RejectionVerifier()):
        verdict = verify(chosen, proposal, logits, settings)
        np.testing.assert_array_equal(chosen.chances(*given, verdict), expected)


def test_a_tree_is_as_deep_as_gamma():
    assert verifier("tree").tree(1) == Tree((3,))
    assert verifier("tree").tree(4) == Tree((3, 2, 1, 1))


# A new one


def test_a_verifier_without_its_method_is_named():
    with pytest.raises(InputError, match="^Verifier has no verify_row: see spec_t5x.verifiers"):
        verify(Verifier(), *batch())


@dataclasses.dataclass(frozen=True)
class FirstOnly(Verifier):
    """Trusts no draft but the first."""

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs):
        shorter = draft_probs.at[1:].set(0.0)  # as if nothing more were proposed
        return token_verification(key, emit_key, draft_tokens, shorter, target_probs)


@dataclasses.dataclass(frozen=True)
class Wide(TreeVerifier):
    """Verifies four drafts for a position by default."""

    widths: tuple[int, ...] = (4,)


@dataclasses.dataclass(frozen=True)
class Scaled(BlockVerifier):
    """Needs a setting that no option gives."""

    scale: float


def test_first_only():
    """The module's example verifies the first draft as token verification does, and no other."""
    proposal, logits = batch()
    verdict = verify(FirstOnly(), proposal, logits)
    all_of_them = verify(TokenVerifier(), proposal, logits)
    np.testing.assert_array_equal(verdict.num_accepted, np.minimum(all_of_them.num_accepted, 1))
    assert np.max(all_of_them.num_accepted) > 1


def test_a_verifier_that_is_registered_has_a_name_for_every_option(monkeypatch):
    monkeypatch.setitem(registry._PLACES, "verifier", dict(registry._PLACES["verifier"]))
    registry.register("verifier", first=f"{__name__}:FirstOnly")
    assert verifier("first") == GenerateOptions(verifier="first").make_verifier() == FirstOnly()
    with pytest.raises(InputError, match="lenience is 0.5 and verifier 'first': use 1, or verif"):
        verifier("first", lenience=0.5)
    registry.register("verifier", tau="math:tau")
    with pytest.raises(InputError, match=r"^verifier 'tau' is registered as 6.28.*: give a class"):
        GenerateOptions(verifier="tau")
    registry.register("verifier", scaled=f"{__name__}:Scaled")
    with pytest.raises(
        InputError, match=r"'scaled' cannot be made .*'scale'.: give its fields def"
    ):
        GenerateOptions(verifier="scaled")


def test_a_registered_verifier_of_trees_takes_widths(monkeypatch):
    monkeypatch.setitem(registry._PLACES, "verifier", dict(registry._PLACES["verifier"]))
    registry.register("verifier", wide=f"{__name__}:Wide")
    assert verifier("wide") == Wide((4,))
    assert GenerateOptions(verifier="wide", widths=(2, 3)).make_verifier() == Wide((2, 3))
    assert verifier("tree") == TreeVerifier((3, 2)) and verifier("multi") == TreeVerifier((3,))
    with pytest.raises(InputError, match=r"widths are \(0,\): give at least 1"):
        verifier("wide", widths=[0])


def test_the_most_that_may_be_drafted():
    for name, widths, most in (
        ("block", (), 16),
        ("tree", (3, 2), 4),
        ("tree", (4, 3, 2), 3),
        ("multi", (63,), 1),
    ):
        assert largest_limit(verifier(name, widths=widths), of_chains=16) == most
    for widths in ((4, 3, 2, 2), (1, 1, 1, 1, 1), (200, 9)):
        with pytest.raises(InputError, match="give gamma a number, or fewer widths"):
            largest_limit(verifier("tree", widths=widths), of_chains=16)
