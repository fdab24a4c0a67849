"""Tests that an EAGLE head drafts as it was trained to: from true states, then from its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.labs.training.kept_layers import with_shared
from spec_t5x.labs.training.student import unroll
from spec_t5x.loops import speculative
from spec_t5x.loops.decode_state import make_context
from spec_t5x.models.eagle import EagleNetwork
from spec_t5x.models.t5 import Transformer
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.draws import RowStream
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.verifiers import verifier
from tests.toy_drafts import tiny_head
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

SOURCES = jnp.array([[5, 6, 7, 8, 5, 1], [9, 9, 4, 1, 0, 0], [7, 6, 5, 4, 3, 1]])
PROMPTS = jnp.array([[0, 0, 0], [0, 7, 0], [0, 3, 9]])
KEYS = jax.random.split(jax.random.key(3), 3)
GAMMA, LENGTH = 3, 24
# Even distributions, so that drafts of random parameters are accepted.
TEMPERATURE = 3.0
SETTINGS = sampling(TEMPERATURE)
TREE = verifier("tree", widths=(2, 1, 1))


@functools.cache
def pair(per_layer=False, **options):
    """Makes a target, and a head of its last layer; ``per_layer`` is the bias of umT5."""
    target = tiny_t5(0, num_decoder_layers=2, relpos_per_layer=per_layer)
    own, config = tiny_head(target, (1,), **options)
    return target, own, EagleDraft.create(own, config, (1,), target)


def after_some_iterations(target, draft, of_verifier, number=5):
    """Returns the draft's state after refusals, and the context of its next proposal."""
    loop = speculative.Loop(gamma=GAMMA, max_decode_len=LENGTH, verifier=of_verifier, eos_id=-1)
    init = jax.jit(functools.partial(speculative.init, loop=loop))
    step = jax.jit(functools.partial(speculative.step, loop=loop))
    state = init(target, draft, SOURCES, PROMPTS, RowStream(KEYS))
    for _ in range(number):
        state, _ = step(target, draft, state, SETTINGS)
    accepted = np.asarray(state.stats.accepted)
    assert not number or np.any(accepted > 0)
    assert not number or np.all(accepted < np.asarray(state.stats.proposed))
    return state.draft_state, make_context(state, SETTINGS, coupled=False)


def unrolled_probs(target, own, draft, context, drafts):
    """Returns each draft's distribution by the network as it is trained, without a cache."""
    at = np.asarray(context.lengths)
    texts = np.array(context.sequences)
    for row, length in enumerate(at):
        texts[row, length + 1 : length + 1 + drafts.shape[1]] = drafts[row]
    shifted = jnp.asarray(texts[:, :-1])

    def read(network: Transformer):
        encoded = network.encode(SOURCES)
        states = network.decode_states(encoded, SOURCES, shifted, jnp.ones_like(shifted))
        return encoded, states

    shows = target.showing(draft.traits.depths)
    encoded, states = shows.module.apply({"params": target.params}, method=read)

    def steps(network: EagleNetwork):
        unrolled = unroll(network, encoded, SOURCES, shifted, states, GAMMA)
        return [network.logits(each) for each in unrolled]

    whole = with_shared(own, target.params, (1,))
    logits = EagleNetwork(draft.model.config).apply({"params": whole}, method=steps)
    rows = np.arange(len(at))
    return np.stack(
        [jax.nn.softmax(each[rows, at + step] / TEMPERATURE) for step, each in enumerate(logits)],
        axis=1,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_layer": True},
        {"reads_source": False},
        {"width": 12},
        {"width": 12, "depths": (0, 1), "reads_source": False},
    ],
    ids=["as wide", "umT5", "the text alone", "narrower", "several depths"],
)
def test_it_drafts_what_it_is_trained_to(options):
    check_chain(*pair(**options), number=5)


def test_its_first_proposals_follow_prompts_that_are_shorter_than_a_block():
    check_chain(*pair(), number=0)


def check_chain(target, own, draft, number):
    state, context = after_some_iterations(target, draft, verifier("block"), number)
    proposal, after = jax.jit(lambda *args: draft.propose(*args, GAMMA))(state, context)
    # Even if all drafts are accepted, the next proposal feeds all that the cache lacks.
    assert draft._num_last(GAMMA) == GAMMA + 1
    np.testing.assert_array_equal(after.lengths, context.lengths + 1)
    expected = unrolled_probs(target, own, draft, context, np.asarray(proposal.tokens))
    np.testing.assert_allclose(proposal.probs, expected, atol=1e-4)


@pytest.mark.parametrize("depths", [(), (0,)])
def test_the_nodes_of_a_tree_follow_their_parents(depths):
    target, own, draft = pair(depths=depths)
    state, context = after_some_iterations(target, draft, TREE)
    tree: Tree = TREE.tree(GAMMA)
    propose = jax.jit(lambda *args: draft.propose_tree(*args, tree)[0])
    proposal = propose(state, context)
    # All of a text is fed to a head that has seen nothing of it.
    fresh = propose(jax.tree.map(jnp.zeros_like, state), context)
    np.testing.assert_allclose(fresh.probs, proposal.probs, atol=1e-4)
    for nodes in ((1, 3, 5), (2, 4, 6)):
        drafts = np.asarray(proposal.tokens)[:, np.array(nodes) - 1]
        expected = unrolled_probs(target, own, draft, context, drafts)
        found = np.asarray(proposal.probs)[:, np.array((0, *nodes[:-1]))]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_states_of_layers_that_another_draft_uses_change_nothing():
    target, _, draft = pair()
    state, context = after_some_iterations(target, draft, verifier("block"))
    states = context.target_states
    wider = context.replace(target_states=jnp.concatenate([states, states + 1], axis=-1))
    expected, found = (draft.propose(state, each, GAMMA)[0].probs for each in (context, wider))
    np.testing.assert_array_equal(found, expected)
