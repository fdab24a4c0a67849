"""Tests of every draft: the target's text and law, independent rows, clean caches."""

import functools

import flax.struct
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.mixed import MixedDraft, MixedState
from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, DraftTraits, Outcome, Proposal, check_fits
from spec_t5x.labs.testing import laws
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.labs.training.kept_layers import keep_layers, narrowed_params
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops import speculative
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import make_context
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.models.binding import bind
from spec_t5x.models.narrow_head import NarrowHead
from spec_t5x.models.shared_params import own_params
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.draws import Draws, RowStream
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Int
from spec_t5x.verifiers import CoupledVerifier, TokenVerifier, TreeVerifier
from tests.toy_drafts import tiny_head
from tests.toy_t5 import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = sampling(0.0)
KEY = jax.random.key(3)
VOCAB = 30
LENGTH = 18
# Sources that texts can be copied from: the toy models write what they were fed, often.
SOURCES = jnp.array(
    [[5, 6, 7, 8, 5, 1], [9, 9, 4, 1, 0, 0], [3, 1, 0, 0, 0, 0], [7, 6, 5, 4, 3, 1]]
)


@flax.struct.dataclass
class Parrot(Draft):
    """A draft of constant tokens."""

    tokens: Int[Array, "n"]
    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state, context, gamma):
        batch = context.lengths.shape[0]
        tokens = jnp.tile(jnp.resize(self.tokens, (1, gamma)), (batch, 1))
        return Proposal(tokens), state


@flax.struct.dataclass
class Doubting(Parrot):
    """A first draft without a state, which proposes nothing after odd tokens."""

    traits = DraftTraits(varies=True)

    def propose(self, state, context, gamma):
        proposal, state = super().propose(state, context, gamma)
        counts = jnp.where(context.last_tokens % 2 == 0, proposal.num_proposed, 0)
        return proposal.replace(counts=counts), state


@functools.cache
def target():
    return tiny_t5(0, num_decoder_layers=2)


@functools.cache
def near():
    return disturbed(target(), 0.05)


def shared_encoder(**settings):
    """Makes a draft of the last of the target's decoder layers, with noise."""
    layers = (1,)
    params, config = keep_layers(target().params, target().config, encoder=(0,), decoder=layers)
    params = disturbed(bind(params, config), 0.05).params
    own = own_params(params)
    if settings.get("head"):
        own = narrowed_params(own, params, config, settings["head"].ids)
    return SharedEncoderDraft.create(own, config, layers, target(), **settings)


def eagle(width=None, depths=(), **settings):
    own, config = tiny_head(target(), (1,), width, depths)
    return EagleDraft.create(own, config, (1,), target(), **settings)


def doubting(second):
    """Makes a draft whose rows take ``second``'s proposals after odd tokens."""
    return MixedDraft(Doubting(jnp.array([8, 6]), VOCAB), second)


T5_DRAFTS = {
    "transformer": lambda: TransformerDraft(near()),
    "uniform": lambda: UniformDraft(VOCAB),
    "copy": lambda: CopyDraft(VOCAB),
    "mixed": lambda: MixedDraft(CopyDraft(VOCAB, min_match=2), TransformerDraft(near())),
    "mixed, doubting": lambda: doubting(TransformerDraft(near())),
    # The second draft writes the target's cache, or reads its states.
    "mixed, early exit": lambda: doubting(SelfDraft.early_exit(target(), 1)),
    "mixed, eagle": lambda: doubting(eagle()),
    "early exit": lambda: SelfDraft.early_exit(target(), 1),
    "int8": lambda: SelfDraft.rounded(target()),
    "int4": lambda: SelfDraft.rounded(target(), bits=4),
    "shared encoder": shared_encoder,
    "shared encoder, narrow head": lambda: shared_encoder(
        head=NarrowHead.create(jnp.arange(1, VOCAB, 2), VOCAB)
    ),
    "eagle": eagle,
    "eagle, narrower": lambda: eagle(width=12, depths=(0,)),
    "parrot": lambda: Parrot(jnp.array([8, 6]), VOCAB),
}


# Changes of the target, and the drafts that need the target's value of it.
IN_CACHE = ("early exit", "int8", "mixed, early exit", "shared encoder", "eagle")
SIZES = {
    ("num_heads", 4, "num_kv_heads 2 and the target has 4"): IN_CACHE,
    ("head_dim", 16, "head_dim 8 and the target has 16"): IN_CACHE,
    ("dtype", "bfloat16", "dtype float32 and the target has bfloat16"): IN_CACHE,
    ("num_decoder_layers", 1, "num_decoder_layers 2 and the target has 1"): (
        "int8",
        "shared encoder",
        "eagle",
    ),
    ("emb_dim", 24, "emb_dim 16 and the target has 24"): ("eagle", "mixed, eagle"),
}


@pytest.mark.parametrize(("field", "value", "message"), SIZES)
@pytest.mark.usefixtures("unchecked")
def test_a_draft_of_a_target_of_other_sizes_is_refused(field, value, message):
    other = tiny_t5(0, **{"num_decoder_layers": 2, field: value})
    for name in SIZES[field, value, message]:
        with pytest.raises(InputError, match=f"Draft needs {message}: make it from this target"):
            check_fits(T5_DRAFTS[name](), other, LENGTH)


@pytest.mark.usefixtures("unchecked")
def test_a_draft_beside_a_target_without_its_cache_is_refused():
    refused = [T5_DRAFTS[name]() for name in ("early exit", "shared encoder", "eagle")]
    refused.append(MixedDraft(refused[0], UniformDraft(VOCAB)))
    for draft in refused:
        with pytest.raises(InputError, match="is of a T5Model and the target a TableTarget"):
            check_fits(draft, TableTarget.create(0, VOCAB), LENGTH)


def drafts(*names):
    return pytest.mark.parametrize("name", names)


PROMPTS = jnp.array([[0, 0, 0], [0, 7, 0], [0, 3, 9], [0, 0, 0]])


def decode(draft, sources=SOURCES, prompts=PROMPTS, rng=KEY, settings=GREEDY, gamma=3, **options):
    options = {"max_decode_len": LENGTH, **options}
    return jax.device_get(
        speculative_decode(target(), draft, sources, prompts, rng, settings, gamma=gamma, **options)
    )


@drafts(*T5_DRAFTS)
@pytest.mark.usefixtures("unchecked")
def test_programs_are_traced_for_batches_of_any_size(name):
    """T5X exports such programs."""
    draft, (batch,) = T5_DRAFTS[name](), jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, width), jnp.int32) for width in (5, 1)]
    verifiers = TokenVerifier(), *[TreeVerifier((2,))] * hasattr(draft, "propose_tree")
    for verifier in verifiers:
        loop = {"gamma": 2, "max_decode_len": LENGTH, "verifier": verifier}
        decode = functools.partial(speculative_decode, target(), draft, **loop)
        traced = jax.eval_shape(decode, *shapes, KEY, GREEDY)
        assert traced.tokens.shape == (batch, 1, LENGTH)


@functools.cache
def plain_text():
    arguments = target(), SOURCES, PROMPTS, KEY, GREEDY
    return jax.device_get(autoregressive_decode(*arguments, max_decode_len=LENGTH))


# ``tests/end_to_end/test_named_drafts.py`` has the drafts with names.
@drafts("parrot", "mixed, early exit")
def test_the_greedy_text_is_that_of_plain_decoding(name):
    np.testing.assert_array_equal(decode(T5_DRAFTS[name]()).tokens, plain_text().tokens)


@drafts("shared encoder", "eagle", "eagle, narrower", "early exit", "mixed, eagle")
def test_the_greedy_text_is_that_of_plain_decoding_at_a_pace(name):
    """Hardly any draft pays under these costs: it waits, and is used again."""
    costly = Pace.start(Costs.by_formula(c=0.5, largest=3), rest=2)
    decoded = decode(T5_DRAFTS[name](), pace=costly)
    np.testing.assert_array_equal(decoded.tokens, plain_text().tokens)
    stats = decoded.stats
    assert np.any(stats.plain_steps > 0)
    assert np.any(stats.target_calls - stats.plain_steps > 1)


@drafts("mixed")
def test_a_row_decodes_as_it_does_beside_other_rows(name):
    draft = T5_DRAFTS[name]()
    keys = outputs_lib.row_keys(KEY, 4)
    settings = sampling(1.0)
    together = decode(draft, rng=keys, settings=settings)
    # As many rows as before, so that nothing is compiled.
    order = jnp.array([2, 0, 0, 2])
    others = decode(draft, SOURCES[order], PROMPTS[order], keys[order], settings)
    for found, expected in zip(jax.tree.leaves(others), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(found, expected[order], atol=1e-4)


def test_several_decodes_share_the_sources_keys_and_values():
    draft, inputs, times, settings = shared_encoder(), 2, 2, sampling(1.0)
    rows = [jnp.repeat(array[:inputs], times, axis=0) for array in (SOURCES, PROMPTS)]
    apart = decode(draft, *rows, outputs_lib.row_keys(KEY, inputs, times), settings)
    arguments = target(), draft, SOURCES[:inputs], PROMPTS[:inputs], KEY, settings
    options = {"gamma": 3, "max_decode_len": LENGTH, "num_decodes": times}
    program = str(speculative_decode.trace(*arguments, **options).jaxpr)
    heads, source, width = target().config.num_heads, SOURCES.shape[1], target().config.head_dim
    assert f"f32[{inputs},{heads},{source},{width}]" in program
    assert f"f32[{inputs * times},{heads},{source},{width}]" not in program
    together = speculative_decode(*arguments, **options)
    # Decodes are sorted by increasing score.
    order = np.argsort(apart.scores.reshape(inputs, times), axis=1, kind="stable")
    tokens = apart.tokens.reshape(inputs, times, LENGTH)
    np.testing.assert_array_equal(
        together.tokens, np.take_along_axis(tokens, order[..., None], axis=1)
    )


# The drafts that have a state; ``test_copying`` tests copying, which depends on earlier acceptance.
@drafts("transformer", "mixed, doubting", "shared encoder", "eagle", "mixed, eagle")
def test_after_refusals_and_plain_steps_a_draft_proposes_what_a_fresh_one_would(name):
    """A draft's state must have no effect on its proposals."""
    draft = T5_DRAFTS[name]()
    gamma, stream = LOOP.gamma, RowStream(outputs_lib.row_keys(KEY, 4))
    step = jax.jit(functools.partial(speculative.step, loop=LOOP))
    init = jax.jit(functools.partial(speculative.init, loop=LOOP))
    propose = jax.jit(lambda draft, state, context: draft.propose(state, context, gamma)[0])
    prefill = jax.jit(lambda draft, text: draft.prefill(SOURCES, text, LENGTH + gamma + 1))
    settings = sampling(1.0)
    state = init(target(), draft, SOURCES, PROMPTS, stream)
    compared = 0
    for plain_steps in (0, 1, 0, 5, 0):
        state, _ = step(target(), draft, state, settings)
        state = go_plainly(draft, state, settings, plain_steps)
        context = make_context(state, settings, coupled=False)
        text = state.outputs.sequences
        is_text = jnp.arange(text.shape[1])[None, :] <= state.outputs.lengths[:, None]
        fresh = propose(draft, prefill(draft, jnp.where(is_text, text, 0)), context)
        kept = propose(draft, state.draft_state, context)
        for row in np.flatnonzero(~np.asarray(state.outputs.ended)):
            count = int(min(kept.num_proposed[row], fresh.num_proposed[row]))
            np.testing.assert_array_equal(kept.tokens[row, :count], fresh.tokens[row, :count])
            probs = (made.distributions(VOCAB)[row, :count] for made in (kept, fresh))
            np.testing.assert_allclose(*probs, atol=1e-4)
            compared += count
    assert compared > 0
    assert np.any(np.asarray(state.stats.accepted) < np.asarray(state.stats.proposed))


def test_a_tree_is_drawn_with_the_drafts_own_settings():
    """At temperature 0 each first child has probability 1, whatever the target samples with."""

    def propose(settings):
        draft, stream = TransformerDraft(near(), settings), RowStream(outputs_lib.row_keys(KEY, 4))
        state = speculative.init(target(), draft, SOURCES, PROMPTS, stream, LOOP)
        context = make_context(state, sampling(1.0), coupled=False)
        return draft.propose_tree(state.draft_state, context, Tree((2, 1)))[0].probs

    of_own, of_targets = (jax.eval_shape(lambda s=s: propose(s)) for s in (GREEDY, None))
    assert of_own is None and of_targets.shape == (4, 3, VOCAB)


@drafts("transformer", "copy", "mixed", "mixed, doubting")
def test_calls_for_other_rows_change_no_proposal_of_a_row(name):
    """In a cascade the rows that have what they need wait for the others."""
    draft, settings = T5_DRAFTS[name](), sampling(1.0)
    gamma, stream = LOOP.gamma, RowStream(outputs_lib.row_keys(KEY, 4))
    step = jax.jit(functools.partial(speculative.step, loop=LOOP))
    init = jax.jit(functools.partial(speculative.init, loop=LOOP))

    @jax.jit
    def call(draft, state, context):
        state = draft.catch_up(state, context, gamma + 1)
        proposal, state = draft.propose(state, context, gamma)
        nothing = jnp.zeros_like(context.lengths)
        return proposal, draft.commit(state, Outcome(lengths=context.lengths, num_accepted=nothing))

    state, compared = init(target(), draft, SOURCES, PROMPTS, stream), 0
    for _ in range(4):
        context = make_context(state, settings, coupled=False)
        waited, waits = state.draft_state, context.replace(live=jnp.zeros(4, bool))
        for _ in range(3):
            _, waited = call(draft, waited, waits)
        expected, found = (call(draft, each, context)[0] for each in (state.draft_state, waited))
        live = ~np.asarray(state.outputs.ended)
        np.testing.assert_array_equal(found.num_proposed[live], expected.num_proposed[live])
        np.testing.assert_array_equal(found.tokens[live], expected.tokens[live])
        compared += int(np.sum(expected.num_proposed[live]))
        state, _ = step(target(), draft, state, settings)
    assert compared > 0


@flax.struct.dataclass
class Noting(Parrot):
    """A draft whose state is what it was called with last."""

    def commit(self, state, outcome):
        return outcome

    def catch_up(self, state, context, width):
        return context, width


def test_a_row_that_is_not_asked_keeps_what_its_cache_lacks():
    """Rows that copy lack tokens of their texts while the others are drafted for."""
    draft, live = TransformerDraft(near()), np.array([True, False, True, False])
    state = draft.prefill(SOURCES, PROMPTS, LENGTH)
    context = Context(
        sequences=jnp.tile(jnp.arange(LENGTH), (4, 1)),
        lengths=jnp.full(4, 6),
        live=jnp.asarray(live),
        draws=Draws(RowStream(outputs_lib.row_keys(KEY, 4)), jnp.full(4, 6)),
        settings=GREEDY,
        target_cache=(),
    )
    after = jax.jit(lambda *given: draft.propose(*given, 3)[1].lengths)(state, context)
    np.testing.assert_array_equal(after, np.where(live, 9, state.lengths))
    assert np.all(state.lengths < 6)


@pytest.mark.usefixtures("unchecked")
def test_what_an_outer_model_refuses_is_refused_in_rows_that_copied_too():
    first, second = (Noting(jnp.array([8, 6]), VOCAB) for _ in range(2))
    lengths, copied = jnp.array([5, 5, 5]), jnp.array([True, True, False])
    state = MixedState(first=(), second=lengths, copied=copied, lengths=lengths)
    outcome = Outcome(lengths=jnp.array([3, 7, 3]), num_accepted=jnp.array([0, 1, 2]))
    state = MixedDraft(first, second).commit(state, outcome)
    np.testing.assert_array_equal(state.second.lengths, [3, 5, 3])
    # The acceptance of each draft counts only its proposals.
    np.testing.assert_array_equal(state.first.num_accepted, [0, 1, 0])
    np.testing.assert_array_equal(state.second.num_accepted, [0, 0, 2])
    np.testing.assert_array_equal(state.first.lengths, outcome.lengths)
    caught = MixedDraft(first, second).catch_up(state, "a context", 4)
    assert caught.first == caught.second == ("a context", 4)


@flax.struct.dataclass
class Counting(Parrot):
    """A draft whose state tells how many tokens it may be fed, twice that after a proposal."""

    def catch_up(self, state, context, width):
        return state + width * jnp.sum(context.live)

    def propose(self, state, context, gamma):
        return super().propose(state, context, gamma)[0], 2 * state


def propose_for(second, live, first=None):
    """Returns the proposal and state of two drafts for rows of which the first one copies."""
    first = first or Doubting(jnp.array([8, 6]), VOCAB)
    copied, lengths = jnp.array([False, True, True]), jnp.array([3, 3, 3])
    state = MixedState(first=(), second=jnp.int32(0), copied=copied, lengths=lengths)
    context = Context(
        sequences=jnp.array([[0, 8], [0, 3], [0, 3]]),
        lengths=jnp.array([1, 1, 1]),
        live=jnp.array(live),
        draws=Draws(RowStream(outputs_lib.row_keys(KEY, 3)), lengths),
        settings=GREEDY,
        target_cache=(),
    )
    return MixedDraft(first, second).propose(state, context, 2)


def test_a_second_draft_is_fed_and_asked_for_rows_without_copies():
    # One row takes up to gamma + 1 tokens.
    for live, fed in (([True, True, False], 6), ([True, False, False], 0)):
        proposal, state = propose_for(Counting(jnp.array([5, 4]), VOCAB), live)
        assert int(state.second) == fed
        np.testing.assert_array_equal(proposal.tokens[:2], [[8, 6], [5, 4] if fed else [0, 0]])
        np.testing.assert_array_equal(proposal.num_proposed[:2], [2, 2 if fed else 0])
        # Rows that are not live keep what they took.
        np.testing.assert_array_equal(state.copied, [True, not live[1], True])
        np.testing.assert_array_equal(state.lengths, [1, 1 if live[1] else 3, 3])


@flax.struct.dataclass
class Stopping(Draft):
    """A draft that proposes more tokens than it has drawn, 1."""

    draft: Draft
    vocab_size: int = flax.struct.field(pytree_node=False, default=VOCAB)

    def propose(self, state, context, gamma):
        proposal, state = self.draft.propose(state, context, gamma)
        probs = proposal.distributions(VOCAB)
        return proposal.replace(probs=probs, drawn=jnp.int32(1)), state


def test_what_either_draft_did_not_draw_is_not_proposed():
    copying, other = Doubting(jnp.array([8, 6]), VOCAB), Parrot(jnp.array([5, 4]), VOCAB)
    for first, second, counts in (
        (copying, Stopping(other), [2, 1, 1]),
        (Stopping(copying), other, [1, 2, 2]),
        (Stopping(copying), Stopping(other), [1, 1, 1]),
    ):
        proposal, _ = propose_for(second, [True, True, True], first)
        np.testing.assert_array_equal(proposal.num_proposed, counts)
        # The proposal has distributions if the second draft has.
        assert (proposal.probs is None) == (second is other)


def test_sampled_texts_of_two_drafts_follow_the_targets_law():
    """Copies have probability 1, also where the other draft's distribution is at hand."""
    first = Doubting(jnp.array([2, 3]), laws.VOCAB_SIZE)
    laws.check_draft(MixedDraft(first, TransformerDraft(laws.other_model())), gamma=3)


def test_two_drafts_may_propose_fewer_tokens_than_gamma():
    @flax.struct.dataclass
    class Short(TransformerDraft):
        def propose(self, state, context, gamma):
            return super().propose(state, context, min(gamma, 2))

    short = Short(laws.other_model())
    mixed = MixedDraft(Doubting(jnp.array([2, 3, 4]), laws.VOCAB_SIZE), short)
    assert mixed.traits.varies and not short.traits.varies
    laws.check_draft(mixed, gamma=3)


def go_plainly(draft, state, settings, num_steps):
    """Takes plain steps, and prepares the draft at the end."""
    if not num_steps:
        return state
    pace = Pace.start(Costs.by_formula(c=0.1, largest=3)).new_batch()
    pace, kept = pace.replace(prefilled=jnp.asarray(True)), state.draft_state
    # Without a draft, all that use no states share one program.
    state = state.replace(pace=pace, draft_state=())
    absent = draft if draft.traits.uses_target_states else UniformDraft(VOCAB)
    for _ in range(num_steps):
        state, _ = _plain_step(target(), absent, state, settings)
    assert int(state.pace.plain_steps) == num_steps
    prepare = jax.jit(functools.partial(speculative.prepare, loop=LOOP))
    state = prepare(draft, SOURCES, PROMPTS, state.replace(draft_state=kept), settings)
    return state.replace(pace=None)


LOOP = speculative.Loop(gamma=3, max_decode_len=LENGTH, verifier=TokenVerifier())
_plain_step = jax.jit(functools.partial(speculative.step, loop=LOOP.plain))


@drafts("mixed", "mixed, early exit", "mixed, eagle")
def test_coupled_the_text_depends_on_the_key_alone(name):
    draft, settings = T5_DRAFTS[name](), sampling(1.0)
    arguments = target(), SOURCES, PROMPTS, KEY, settings
    plain = autoregressive_decode(*arguments, coupled=True, max_decode_len=LENGTH)
    decoded = decode(draft, settings=settings, verifier=CoupledVerifier())
    np.testing.assert_array_equal(decoded.tokens, plain.tokens)
    assert np.sum(decoded.stats.accepted) > 0
