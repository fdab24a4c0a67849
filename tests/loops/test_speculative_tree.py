"""Trees of drafts: the target's text and law for every shape."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.testing import laws
from spec_t5x.loops import arguments, speculative
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import make_context
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode, speculative_steps
from spec_t5x.sampling.distributions import normalize, sampling
from spec_t5x.sampling.draws import RowStream, t5x_stream
from spec_t5x.types import EOS_ID
from spec_t5x.verifiers import TokenVerifier, TreeVerifier
from tests.loops.stubs import drain
from tests.toy_t5 import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = sampling(0.0)
KEY = jax.random.key(5)
SOURCES = jnp.array([[5, 6, 7, 1], [9, 1, 0, 0], [3, 4, 1, 0]])
PROMPTS = jnp.array([[0, 0, 0], [0, 7, 0], [0, 3, 9]])
LENGTH = 14


@functools.cache
def target():
    return tiny_t5(0)


@functools.cache
def near():
    return disturbed(target(), 0.05)


def decode(draft, verifier, settings=GREEDY, gamma=3, rng=KEY, pace=None, rows=slice(None)):
    arguments = target(), draft, SOURCES[rows], PROMPTS[rows], rng, settings
    options = {"gamma": gamma, "verifier": verifier, "max_decode_len": LENGTH, "pace": pace}
    return jax.device_get(speculative_decode(*arguments, **options))


@functools.cache
def plain():
    return jax.device_get(
        autoregressive_decode(target(), SOURCES, PROMPTS, KEY, GREEDY, max_decode_len=LENGTH)
    )


def check_appended(decoded):
    """Asserts that generated tokens are counted, and prompts are not."""
    generated = decoded.lengths[:, 0] - np.sum(np.asarray(PROMPTS)[:, 1:] != 0, axis=1)
    stats = decoded.stats
    np.testing.assert_array_equal(stats.appended[:, 0], generated)
    efficiency = generated / stats.target_calls[:, 0]
    np.testing.assert_allclose(stats.block_efficiency[:, 0], efficiency, rtol=1e-6)
    assert np.all(stats.accepted_by_position <= stats.verified_by_position)


def test_a_tree_of_one_branch_is_a_chain():
    """With a greedy draft all results are the same; with more children the calls are fewer."""
    draft = TransformerDraft(near(), GREEDY)
    for settings in (sampling(1.0), GREEDY):
        tree, chain = (
            decode(draft, each, settings) for each in (TreeVerifier((1,)), TokenVerifier())
        )
        for found, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(chain), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-4)
    verifier = TreeVerifier((2, 2))
    wide = decode(TransformerDraft(near()), verifier)
    assert np.sum(wide.stats.target_calls) < np.sum(tree.stats.target_calls)
    np.testing.assert_array_equal(wide.tokens, plain().tokens)
    np.testing.assert_allclose(wide.scores, plain().scores, atol=1e-4)
    drafts = verifier.num_nodes(3) - 1
    np.testing.assert_array_equal(wide.stats.proposed, drafts * wide.stats.target_calls)
    check_appended(wide)


@pytest.mark.parametrize("ends", [EOS_ID, (EOS_ID, 3)])
def test_sampled_texts_follow_the_targets_law(ends):
    """Top-2 drafts in a tree of threes have a third child that could not be drawn."""
    draft = TransformerDraft(laws.other_model(), sampling(1.0, top_k=2))
    decoded = laws.decode_many(draft, gamma=2, verifier=TreeVerifier((3, 2)), eos_id=ends)
    assert 0 < np.sum(decoded.stats.accepted) < np.sum(decoded.stats.verified)
    statistic, threshold = laws.chi_square(decoded, sampling(1.0), eos_id=ends)
    assert statistic < threshold


@flax.struct.dataclass
class OfAnyDepth(TransformerDraft):
    """Proposes 0 levels of a tree, one, …, all of them; the others have a token it did not draw."""

    def propose_tree(self, state, context, tree):
        proposal, state = super().propose_tree(state, context, tree)
        depths = context.lengths % (tree.depth + 1)
        drawn = tree.depths[None, 1:] <= depths[:, None]
        return proposal.replace(tokens=jnp.where(drawn, proposal.tokens, 2), depths=depths), state


def test_levels_that_are_not_proposed_are_not_verified():
    verifier, draft, keys = TreeVerifier((2, 2)), OfAnyDepth(near()), outputs_lib.row_keys(KEY, 3)
    options = {"gamma": 3, "verifier": verifier, "max_decode_len": LENGTH}
    steps = speculative_steps(target(), draft, SOURCES, PROMPTS, keys, GREEDY, **options)
    iterations, decoded = drain(steps)
    np.testing.assert_array_equal(decoded.tokens, plain().tokens)
    lengths, seen = np.sum(np.asarray(PROMPTS) != 0, axis=1), set()
    proposed, nodes = np.zeros(3, int), verifier.num_nodes(3) - 1
    for iteration in iterations:
        depths, live = lengths % 4, iteration.num_appended > 0
        assert np.all(iteration.num_accepted <= depths)
        expected = np.minimum(iteration.num_accepted + 1, depths)
        np.testing.assert_array_equal(iteration.num_proposed[live], expected[live])
        seen |= set(depths[live].tolist())
        proposed += nodes * (live & (depths > 0))
        lengths = lengths + iteration.num_appended
    np.testing.assert_array_equal(decoded.stats.proposed[:, 0], proposed)
    assert seen == {0, 1, 2, 3}
    sampled = laws.decode_many(
        OfAnyDepth(laws.other_model()), gamma=2, verifier=TreeVerifier((3, 2))
    )
    assert np.sum(sampled.stats.accepted) > 0
    statistic, threshold = laws.chi_square(sampled, sampling(1.0))
    assert statistic < threshold


def test_rows_at_temperature_0_are_greedy_beside_sampled_ones():
    mixed = decode(
        TransformerDraft(near()), TreeVerifier((2, 2)), sampling(np.array([0.0, 1.0, 0.0]))
    )
    np.testing.assert_array_equal(mixed.tokens[[0, 2]], plain().tokens[[0, 2]])
    assert not np.array_equal(mixed.tokens[1], plain().tokens[1])


def test_beta_is_of_the_nodes_on_the_path():
    """The target as its own draft has every first child accepted, with probability 1."""
    stats = decode(TransformerDraft(target()), TreeVerifier((2, 2)), sampling(1.0)).stats
    assert np.all(stats.accepted_by_position[..., -1] > 0)
    np.testing.assert_allclose(stats.beta_sum, stats.verified, rtol=1e-5)


@flax.struct.dataclass
class Misreporting(TransformerDraft):
    """Draws from one distribution and reports that of another temperature."""

    def propose_tree(self, state, context, tree):
        proposal, state = super().propose_tree(state, context, tree)
        return proposal.replace(probs=normalize(jnp.sqrt(proposal.probs))), state


def test_a_draft_that_misreports_its_probabilities_fails_the_chi_square():
    draft = Misreporting(laws.other_model())
    decoded = laws.decode_many(draft, gamma=2, verifier=TreeVerifier((2,)))
    statistic, threshold = laws.chi_square(decoded, sampling(1.0))
    assert statistic > threshold


def test_a_row_decodes_as_it_does_beside_other_rows():
    keys, order = outputs_lib.row_keys(KEY, 3), jnp.array([1, 0, 1])
    verifier, draft = TreeVerifier((2, 2)), TransformerDraft(near())
    together = decode(draft, verifier, sampling(1.0), rng=keys)
    # As many rows: the program is compiled already.
    others = decode(draft, verifier, sampling(1.0), rng=keys[order], rows=order)
    for found, expected in zip(jax.tree.leaves(others), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(found, expected[order], atol=1e-4)


def test_stepping_gives_the_same_text():
    """Iterations record accepted drafts and the first refused one."""
    verifier, draft = TreeVerifier((2, 2)), TransformerDraft(near())
    keys = outputs_lib.row_keys(KEY, 3)
    arguments = (target(), draft, SOURCES, PROMPTS, keys, sampling(1.0))
    options = {"gamma": 3, "verifier": verifier, "max_decode_len": LENGTH}
    iterations, decoded = drain(speculative_steps(*arguments, **options))
    refused, repeats = 0, []
    for iteration in iterations:
        # Ended rows propose nothing.
        assert not np.any(iteration.num_proposed[iteration.num_appended == 0])
        for row, accepted in enumerate(iteration.num_accepted.tolist()):
            proposed, appended = iteration.proposed[row], iteration.appended[row]
            assert accepted <= iteration.num_proposed[row] <= 3
            np.testing.assert_array_equal(proposed[:accepted], appended[:accepted])
            if accepted < min(iteration.num_appended[row], 3):
                assert iteration.num_proposed[row] == accepted + 1
                assert proposed[accepted] != appended[accepted]
                refused += 1
                repeats += [proposed[accepted] == proposed[accepted - 1]] * (accepted > 0)
    expected = decode(draft, verifier, sampling(1.0), rng=keys)
    np.testing.assert_array_equal(decoded.tokens, expected.tokens)
    # The refused draft follows the accepted ones.
    assert refused > 0 and repeats and not all(repeats)


def test_the_greedy_text_is_that_of_plain_decoding_at_a_pace():
    costs = Costs.by_formula(c=0.6, largest=3, whole=True)
    costly = Pace.start(costs, rest=2)
    poor = TransformerDraft(disturbed(target(), 0.3))
    decoded = decode(poor, TreeVerifier((3, 2)), pace=costly)
    np.testing.assert_array_equal(decoded.tokens, plain().tokens)
    stats = decoded.stats
    assert np.any(stats.plain_steps > 0)
    assert np.any(stats.target_calls - stats.plain_steps > 1)
    assert np.sum(decoded.stats.accepted) > 0
    # A tree counts as drafts of its depth.
    assert decoded.pace.drafted == 3 * decoded.pace.iterations
    check_appended(decoded)


def test_after_refusals_both_caches_are_those_of_a_fresh_prefill():
    draft, verifier, gamma = TransformerDraft(near()), TreeVerifier((3, 2)), 3
    tree, stream = verifier.tree(gamma), RowStream(outputs_lib.row_keys(KEY, 3))
    loop = speculative.Loop(gamma=gamma, max_decode_len=LENGTH, verifier=verifier)
    init = jax.jit(functools.partial(speculative.init, loop=loop))
    one_step = jax.jit(functools.partial(speculative.step, loop=loop))
    propose = jax.jit(lambda draft, state, context: draft.propose_tree(state, context, tree)[0])
    prefill = jax.jit(lambda draft, text: draft.prefill(SOURCES, text, LENGTH + tree.num_nodes))
    score = jax.jit(lambda model, cache, tokens: model.score(cache, tokens)[0])
    state = init(target(), draft, SOURCES, PROMPTS, stream)
    for _ in range(3):
        state, _ = one_step(target(), draft, state, sampling(1.0))
        text, lengths = state.outputs.sequences, state.outputs.lengths
        text = jnp.where(jnp.arange(text.shape[1])[None, :] <= lengths[:, None], text, 0)
        context = make_context(state, sampling(1.0), coupled=False)
        fresh = propose(draft, prefill(draft, text), context)
        kept = propose(draft, state.draft_state, context)
        np.testing.assert_array_equal(kept.tokens, fresh.tokens)
        np.testing.assert_allclose(kept.probs, fresh.probs, atol=1e-4)
        empty = target().prefill(SOURCES, LENGTH + tree.num_nodes)
        whole = score(target(), empty, text)
        last = context.last_tokens[:, None]
        np.testing.assert_allclose(
            score(target(), state.target_cache, last)[:, 0],
            jnp.take_along_axis(whole, lengths[:, None, None], axis=1)[:, 0],
            atol=1e-4,
        )
    assert np.any(np.asarray(state.stats.accepted) < np.asarray(state.stats.verified))


def test_without_drafts_a_tree_is_plain_decoding():
    found = decode(TransformerDraft(near()), TreeVerifier(), gamma=0)
    np.testing.assert_array_equal(found.tokens, plain().tokens)


def test_what_trees_cannot_be_used_with_is_refused():
    @flax.struct.dataclass
    class Bare:
        vocab_size, state_size, max_positions = 30, 0, None
        prefill = score = rollback = len

    draft, tree = TransformerDraft(near()), TreeVerifier()
    with pytest.raises(InputError, match="UniformDraft has no propose_tree: give"):
        decode(UniformDraft(30), tree)
    loop = speculative.Loop(gamma=3, verifier=tree, max_decode_len=LENGTH)
    with pytest.raises(InputError, match="Bare has no num_slots, score_nodes, move: use"):
        arguments.check(Bare(), draft, PROMPTS, loop)
    with pytest.raises(InputError, match="coupled"):
        decode(draft, tree, rng=t5x_stream(KEY, jnp.zeros(3, jnp.int32), 9))
    with pytest.raises(InputError, match="at most 256"):
        decode(draft, TreeVerifier((9, 9, 9)), gamma=3)
    with pytest.raises(InputError, match="the largest of widths is 31: give at least 1, at"):
        decode(draft, TreeVerifier((2, 31)), gamma=2)


@pytest.mark.usefixtures("unchecked")
def test_trees_of_another_shape_or_type_are_refused():
    changes = {
        "tokens": lambda tokens: tokens[:, 1:],
        "probs": lambda probs: probs.astype(jnp.bfloat16),
        "depths": lambda depths: depths[0],
    }

    @flax.struct.dataclass
    class Odd(TransformerDraft):
        name: str = flax.struct.field(pytree_node=False, default="")

        def propose_tree(self, state, context, tree):
            proposal, state = super().propose_tree(state, context, tree)
            odd = changes[self.name](getattr(proposal, self.name))
            return proposal.replace(**{self.name: odd}), state

    for name in changes:
        with pytest.raises(InputError, match=f"Odd proposes .* as {name}: give "):
            decode(Odd(near(), name=name), TreeVerifier(), sampling(1.0), gamma=1)
