"""The checks of drafts, verifiers and targets find what is wrong, and pass what is right."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft, DraftTraits, Proposal, TreeDraft, TreeProposal
from spec_t5x.labs.testing.laws import (
    VOCAB_SIZE,
    check_draft,
    check_target,
    check_verifier,
    chi_square,
    decode_many,
    target,
)
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.sampling.distributions import sampling, standardize
from spec_t5x.sampling.verification import Verdict, node_verification, token_verification
from spec_t5x.types import Array, Float32
from spec_t5x.verifiers import TokenVerifier, TreeVerifier, Verifier
from tests.toy_drafts import ConstantDraft
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

INPUTS = jnp.array([[5, 6, 1], [7, 1, 0]])


@flax.struct.dataclass
class Wrong(Draft):
    """A draft with one distribution; ``kind`` names its mistake."""

    logits: Float32[Array, "vocab"]
    kind: str = flax.struct.field(pytree_node=False, default="nothing")

    @property
    def vocab_size(self):
        return self.logits.shape[0]

    def propose(self, state, context, gamma):
        batch, draws, tokens = context.lengths.shape[0], context.draws, []
        probs = standardize(jnp.tile(self.logits[None], (batch, 1)), context.settings)
        for _ in range(gamma):
            if self.kind.startswith("one draw"):
                token, draws = context.draws.next(probs, context.settings)
            else:
                token, draws = draws.next(probs, context.settings)
            tokens.append(token)
        drawn = gamma if self.kind == "one draw, and says otherwise" else draws.drawn
        if self.kind == "other probs":
            probs = standardize(jnp.log(probs) / 3, context.settings)
        if self.kind == "bfloat16":
            probs = probs.astype(jnp.bfloat16)
        if self.kind == "no draws":
            drawn = None
        probs = jnp.tile(probs[:, None], (1, gamma, 1))
        return Proposal(jnp.stack(tokens, axis=1), probs, drawn), state


LOGITS = jnp.array([0.5, -0.5, 1.0, 0.0])


@flax.struct.dataclass
class Looped(Wrong):
    """A draft that draws every token with the draws that its loop began with."""

    def propose(self, state, context, gamma):
        batch = context.lengths.shape[0]
        probs = standardize(jnp.tile(self.logits[None], (batch, 1)), context.settings)

        def draw(place, carry):
            token, draws = context.draws.next(probs, context.settings)
            return draws, carry[1].at[:, place].set(token)

        nothing = jnp.zeros((batch, gamma), jnp.int32)
        draws, tokens = jax.lax.fori_loop(0, gamma, draw, (context.draws, nothing))
        return Proposal(tokens, jnp.tile(probs[:, None], (1, gamma, 1)), draws.drawn), state


def test_tokens_of_used_draws_are_not_proposed():
    decoded = decode_many(Looped(LOGITS), 3)
    statistic, threshold = chi_square(decoded, sampling(1.0))
    assert statistic < threshold
    np.testing.assert_array_equal(decoded.stats.proposed, decoded.stats.target_calls)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one draw, and says otherwise", "Wrong breaks the target's law: chi-square"),
        ("other probs", "the very distribution that it was drawn from"),
        ("one draw", "proposes 3 tokens and drew 1: draw each with the draws that"),
        ("no draws", "the number of tokens drawn from them"),
    ],
)
def test_a_draft_that_breaks_the_law_is_found(kind, message):
    with pytest.raises(InputError, match=message):
        check_draft(Wrong(LOGITS, kind))


def test_a_drafts_bfloat16_is_refused(unchecked):
    with pytest.raises(InputError, match="proposes bfloat16 .* as probs: give float32"):
        check_draft(Wrong(LOGITS, "bfloat16"))


def test_a_draft_of_which_nothing_is_accepted_proves_nothing():
    never = TableTarget(jnp.zeros_like(target().table).at[:, 3].set(-jnp.inf))
    draft = ConstantDraft(jnp.int32(3), VOCAB_SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_t5x.labs.testing.laws.target", lambda: never)
        with pytest.raises(InputError, match="so nothing was tested"):
            check_draft(draft)


@flax.struct.dataclass
class SizedState:
    """A state that has another tree structure for another size."""

    rows: Array
    size: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Counter(TreeDraft):
    """A draft whose state counts accepted tokens; ``kind`` names its mistake."""

    kind: str = flax.struct.field(pytree_node=False, default="nothing")
    vocab_size: int = flax.struct.field(pytree_node=False, default=VOCAB_SIZE)

    def prefill(self, inputs, prompts, max_length):
        if self.kind == "a size":
            return SizedState(jnp.zeros(inputs.shape[0]), max_length)
        return jnp.zeros(() if self.kind == "one state" else inputs.shape[0], jnp.int32)

    def propose(self, state, context, gamma):
        batch = context.lengths.shape[0]
        proposal = Proposal(jnp.full((batch, gamma), 2, jnp.int32))
        if self.kind == "one distribution":
            probs = jnp.full((batch, gamma), 0.25)
            proposal = proposal.replace(probs=probs, drawn=gamma)
        if self.kind == "one count":
            proposal = proposal.replace(counts=jnp.int32(1))
        return proposal if self.kind == "no new state" else (proposal, state)

    def commit(self, state, outcome):
        if self.kind == "tuple":
            return (state,)
        if outcome.path is not None and self.kind == "other":
            return state.astype(jnp.int8)
        return state + outcome.num_accepted * (1.0 if self.kind == "float" else 1)

    def catch_up(self, state, context, width):
        return state[:1] if self.kind == "one row" else state

    def propose_tree(self, state, context, tree):
        batch, num = context.lengths.shape[0], tree.num_nodes - (self.kind != "too many nodes")
        tokens = jnp.tile(jnp.arange(num)[None] % 4, (batch, 1))
        return TreeProposal(tokens=tokens, probs=None, depths=jnp.full(batch, tree.depth)), state


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "one state",
            r"the state of Counter: it has shape \(\) for 3 rows and \(\) for 1: every leaf",
        ),
        ("a size", "no row can be taken from a state of Counter of another max_length"),
        ("no new state", "Counter.propose returns a Proposal: return a Proposal and a state"),
        ("one distribution", r"float32 \[3, 3\] as probs: give float32 \[3, 3, 4\]"),
        ("one count", r"int32 \[\] as counts: give integer \[3\]"),
        ("tuple", "Counter.commit changes the structure of the state"),
        ("float", r"commit makes float32 \[3\] of the state's array, int32 \[3\]: keep"),
        ("one row", r"catch_up makes int32 \[1\] of the state's array, int32 \[3\]: keep"),
    ],
)
def test_states_and_proposals_of_other_shapes_are_found(unchecked, kind, message):
    with pytest.raises(InputError, match=message):
        check_draft(Counter(kind))


def test_trees_and_states_after_them_of_other_shapes_are_found(unchecked):
    check_draft(Counter(), gamma=2, verifier=TreeVerifier((2,)))
    messages = {
        "too many nodes": r"int32 \[3, 5\] as tokens: give integer \[3, 4\]",
        "other": r"commit makes int8 \[3\] of the state's array, int32 \[3\]: keep",
    }
    for kind, message in messages.items():
        with pytest.raises(InputError, match=message):
            check_draft(Counter(kind), gamma=2, verifier=TreeVerifier((2,)))

    @flax.struct.dataclass
    class Former(Counter):
        def commit_tree(self, state, outcome):
            return state

    with pytest.raises(InputError, match="nothing calls Former.commit_tree: let commit read"):
        check_draft(Former())


def test_what_is_no_draft_is_named(unchecked):
    class Undecorated(Counter):
        pass

    @flax.struct.dataclass
    class Sized(Counter):
        vocab_size: int = VOCAB_SIZE

    @flax.struct.dataclass
    class Named(Counter):
        name: str = "draft"

    @flax.struct.dataclass
    class Varying(Counter):
        traits: DraftTraits = DraftTraits(varies=True)

    for draft, message in (
        (Named(), r"Named.name is a leaf, .* flax.struct.field\(pytree_node=False\)"),
        (Varying(), "Varying.traits is a leaf"),
        (Counter, "Counter is a class: give an object of a flax.struct.dataclass"),
        (Undecorated(), "Undecorated is no pytree: give an object"),
        (Sized(), r"Sized.vocab_size is a leaf, .* flax.struct.field\(pytree_node=False\)"),
    ):
        with pytest.raises(InputError, match=message):
            check_draft(draft)


def test_what_is_no_verifier_is_named(unchecked):
    @dataclasses.dataclass(frozen=True)
    class Listed(TokenVerifier):
        shares: list = dataclasses.field(default_factory=list)

    @dataclasses.dataclass(frozen=True)
    class Rows(TreeVerifier):
        verify_row = TokenVerifier.verify_row

    for verifier, message in (
        (TokenVerifier(0.5), "TokenVerifier is lossy, and has another law"),
        (Rows(), "Rows has verify_row, which nothing calls, as it verifies trees: give verify_n"),
        (TokenVerifier, "verifier is <class .*TokenVerifier'>: give an object of spec_t5x.verif"),
        (Listed(), r"Listed has no hash \(unhashable .*\): make it a frozen dataclass"),
        (Verifier(), "Verifier has no verify_row"),
    ):
        with pytest.raises(InputError, match=message):
            check_verifier(verifier)
    with pytest.raises(InputError, match="settings are .*: give distributions.sampling"):
        check_verifier(TokenVerifier(), settings=0.5)


@dataclasses.dataclass(frozen=True)
class Generous(Verifier):
    """A verifier that accepts the first draft always."""

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        verdict = token_verification(key, emit_key, draft_tokens, draft_probs, target_probs)
        return verdict.replace(num_accepted=jnp.maximum(verdict.num_accepted, 1))


@dataclasses.dataclass(frozen=True)
class Forgetful(TreeVerifier):
    """A verifier of trees that draws from the target, whatever it rejected."""

    def verify_node(self, uniforms, children, draft_probs, target_probs):
        chosen, _ = node_verification(uniforms, children, draft_probs, target_probs)
        return chosen, target_probs


def test_right_drafts_and_verifiers_pass_and_a_wrong_verifier_is_found():
    check_draft(Wrong(LOGITS))
    check_verifier(TreeVerifier((2,)), gamma=2, settings=sampling(0.7))
    with pytest.raises(InputError, match="Generous breaks the target's law"):
        check_verifier(Generous(), gamma=2)
    with pytest.raises(InputError, match="Forgetful breaks the target's law"):
        check_verifier(Forgetful((2,)), gamma=2, settings=sampling(0.7))


@flax.struct.dataclass
class SumCache:
    """Sums over the fed tokens, by position."""

    sums: Float32[Array, "batch length vocab"]
    lengths: Array
    # Width of the sources.
    widths: Array


@flax.struct.dataclass
class SizedCache(SumCache):
    """A cache that has another tree structure for another size."""

    size: int = flax.struct.field(pytree_node=False, default=0)


@flax.struct.dataclass
class SumTarget:
    """A target whose logits are cosines of sums over the text; ``kind`` names its mistake."""

    kind: str = flax.struct.field(pytree_node=False, default="nothing")
    vocab_size: int = flax.struct.field(pytree_node=False, default=9)
    state_size, max_positions = 2, None

    def prefill(self, inputs, max_length, prompts=None):
        batch = inputs.shape[0]
        sums = jnp.zeros((batch, max_length, self.vocab_size))
        lengths, widths = jnp.zeros(batch, jnp.int32), jnp.full(batch, inputs.shape[1])
        if self.kind == "one length for all rows":
            lengths = jnp.zeros(1, jnp.int32)
        if self.kind == "remembers its size":
            widths = jnp.full(batch, max_length)
        if self.kind == "counts its rows":
            return sums, *[lengths] * batch
        if self.kind == "has a size":
            return SizedCache(sums=sums, lengths=lengths, widths=widths, size=max_length)
        cache = SumCache(sums=sums, lengths=lengths, widths=widths)
        if prompts is None or self.kind == "forgets prompts":
            return cache
        return self.score(cache, prompts)[2]

    def score(self, cache, tokens, num=None):
        batch, new = tokens.shape
        lengths = jnp.broadcast_to(cache.lengths, (batch,))
        at = lengths[:, None] + jnp.arange(new)[None, :]
        factors = jnp.arange(1.0, 1 + self.vocab_size)
        fed = jnp.sin((1.0 + tokens)[..., None] * factors[None, None, :])
        rows = jnp.arange(batch)[:, None]
        written = cache.sums.at[rows, at]
        sums = written.add(fed) if self.kind == "adds to its cache" else written.set(fed)
        seen = jnp.where(jnp.arange(sums.shape[1])[None, None, :] <= at[..., None], 1.0, 0.0)
        if self.kind == "looks ahead":
            seen = jnp.ones_like(seen)
        logits = jnp.cos(3 * jnp.einsum("bnl,blv->bnv", seen, sums))
        if self.kind == "sees padding":
            logits += cache.widths[:, None, None]
        if self.kind == "tells rows by their place":
            logits += jnp.arange(batch)[:, None, None]
        if self.kind == "remembers its size":
            logits += (cache.widths - cache.sums.shape[1])[:, None, None]
        return logits, logits[..., :2], cache.replace(sums=sums, lengths=cache.lengths + new)

    def rollback(self, cache, lengths):
        return cache if self.kind == "rolls back nothing" else cache.replace(lengths=lengths)


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny_t5(0),
        target,
        SumTarget,
        # Logits that do not depend on the text.
        lambda: TableTarget.create(0, 5, contexts=1),
    ],
    ids=["T5", "table", "sum", "no memory"],
)
def test_targets_that_are_right_pass(model):
    check_target(model(), INPUTS % 4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "inputs have 1 row"),
        ("one length for all rows", r"the cache: .lengths has shape \(1,\) for 2 rows"),
        ("counts its rows", "the cache has other leaves for 2 rows than for 1"),
        ("sees padding", r"SumTarget: padding \(0\) after a source changes its logits"),
        ("adds to its cache", "SumTarget: what was rolled back still counts"),
        ("rolls back nothing", "SumTarget: rollback changes nothing"),
        ("looks ahead", "a block of tokens gets other logits"),
        ("tells rows by their place", "a row's logits change with its place"),
        ("remembers its size", "a row that took another's place gets other logits"),
        ("forgets prompts", "after prompts in prefill the logits are not those of score"),
        ("has a size", "no row can be taken from a cache of another max_length"),
    ],
)
def test_a_target_that_is_wrong_is_found(kind, message):
    with pytest.raises(InputError, match=message):
        check_target(SumTarget(kind), INPUTS[:1] if kind == "nothing" else INPUTS)


def test_inputs_that_are_no_arrays_and_a_class_are_refused(unchecked):
    with pytest.raises(InputError, match=r"inputs are \[\[2, 3\], \[1, 0\]\]: give arrays"):
        check_target(SumTarget(), [[2, 3], [1, 0]])
    with pytest.raises(InputError, match="SumTarget is a class: give an object"):
        check_target(SumTarget, INPUTS)


def test_nodes_that_are_scored_or_moved_wrongly_are_found():
    @flax.struct.dataclass
    class Blind(TableTarget):
        def score_nodes(self, cache, nodes):
            logits, states, cache = super().score_nodes(cache, nodes)
            return logits[:, ::-1], states, cache

    @flax.struct.dataclass
    class Unmoved(TableTarget):
        def move(self, cache, slots, starts):
            return cache

    for kind, message in ((Blind, "a tree's path gets other"), (Unmoved, "after move the logits")):
        with pytest.raises(InputError, match=message):
            check_target(kind(target().table), INPUTS % 4)
