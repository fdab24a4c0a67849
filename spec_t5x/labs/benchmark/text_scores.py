"""Acceptance rates of drafts at every position of the target's texts.

Corollary 3.6 takes the expectation over texts that the target generates: no proposal needs to be
verified. In one pass the target generates, every draft proposes one token at each position, and
the distributions of both models are compared.
"""

from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x import interfaces
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, DraftState, DraftTraits, Outcome, Target
from spec_t5x.labs.theory import formulas
from spec_t5x.loops import arguments, compiled, decode_state, speculative
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.decode_state import DecodeState, Loop, done, with_states
from spec_t5x.sampling.distributions import Sampling, values_at
from spec_t5x.sampling.draws import RowStream
from spec_t5x.types import EOS_ID, Array, Bool, EndOfSequence, Float32, Int, Key, PyTree


@flax.struct.dataclass(kw_only=True)
class TextScores:
    """Scores at each generated token of each text, counted from the first one after the prompt."""

    # True where there is a token: texts end at different lengths.
    written: Bool[Array, "batch length"]
    # By draft: beta, the chance that its token is accepted; means nothing where it proposed none.
    betas: dict[str, Float32[Array, "leniences batch length"]]
    # By draft: true where it proposed a token.
    proposed: dict[str, Bool[Array, "batch length"]]


@flax.struct.dataclass
class _Drafts(Draft):
    """Several drafts as one, whose state is a dictionary of theirs; ``_ask`` calls each."""

    drafts: dict[str, Draft]
    vocab_size: int = flax.struct.field(pytree_node=False)
    traits: DraftTraits = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, drafts: Mapping[str, Draft], vocab_size: int) -> "_Drafts":
        """Joins drafts; the traits request the target's hidden states that any of them reads.

        The layers of each draft must be the first ones of the longest list, else ``InputError``.
        """
        depths = {name: draft.traits.depths for name, draft in drafts.items()}
        deepest = max(depths.values(), key=len, default=())
        for name, each in depths.items():
            if each != deepest[: len(each)]:
                raise InputError(
                    f"draft {name} reads the target's layers {list(each)}, another reads "
                    f"{list(deepest)}: measure them one by one"
                )
        uses_states = any(draft.traits.uses_target_states for draft in drafts.values())
        return cls(drafts, vocab_size, DraftTraits(uses_target_states=uses_states, depths=deepest))

    def prefill(self, inputs, prompts, max_length) -> dict[str, DraftState]:
        """Returns the states of all drafts by name; the arguments are ``Draft.prefill``'s."""
        return {n: each.prefill(inputs, prompts, max_length) for n, each in self.drafts.items()}

    def propose(self, state, context, gamma):
        """Raises ``NotImplementedError``: ``_ask`` calls each draft separately."""
        raise NotImplementedError


@compiled.jit(static_argnames=("max_decode_len", "leniences", "eos_id"))
def score_texts(
    target: Target,
    drafts: Mapping[str, Draft],
    inputs: PyTree,
    prompts: Int[Array, "batch prompt"],
    keys: Key[Array, "batch"],
    settings: Sampling,
    *,
    max_decode_len: int,
    max_decode_steps: Int[Array, "batch"] | None = None,
    texts: Int[Array, "batch length"] | None = None,
    leniences: tuple[float, ...] = (1.0,),
    eos_id: EndOfSequence = EOS_ID,
) -> TextScores:
    """Computes the acceptance rate of each draft at each token that the target generates.

    The rate is ``sum min(p / l, q)``; at temperature 0 with a lenience l below 1, the probability
    of ``p(x) >= l max(p)`` for x drawn from q, with p at temperature 1 (section A.5).

    Args:
      drafts: by name; a draft may have other settings of sampling than the target.
      target, inputs, prompts, keys, settings, max_decode_len, max_decode_steps, eos_id: as of
        ``autoregressive_decode``, which generates the same texts.
      texts: tokens to score in place of the target's own, prompts included, in
        ``max_decode_len`` positions.
      leniences: l of section A.5; 1 is Algorithm 1.

    Raises:
      InputError: a draft has another vocabulary than the target, needs hidden states of a
        target that has none, or reads other layers than another draft.
    """
    loop = Loop(gamma=1, max_decode_len=max_decode_len, eos_id=eos_id)
    for draft in drafts.values():
        arguments.check(target, draft, prompts, loop)
    together = _Drafts.of(drafts, target.vocab_size)
    stream, batch = RowStream(keys), prompts.shape[0]
    state = decode_state.init(
        target, together, inputs, prompts, stream, loop, max_decode_steps=max_decode_steps
    )
    nowhere = jnp.zeros((batch, max_decode_len), bool)
    unscored_betas = jnp.zeros((len(leniences), *nowhere.shape), jnp.float32)
    scores = {
        "written": nowhere,
        "betas": dict.fromkeys(drafts, unscored_betas),
        "proposed": dict.fromkeys(drafts, nowhere),
    }

    def score_position(carry) -> tuple[DecodeState, dict, Int[Array, ""]]:
        state, scores, position = carry
        before, context = state.outputs, decode_state.make_context(state, settings, coupled=False)
        found = speculative.draw(target, together, state.draft_state, context, stream, False)
        tokens = found.verdict.next_token
        if texts is not None:
            at = jnp.minimum(before.lengths, max_decode_len - 1)
            tokens = values_at(jnp.asarray(texts), at)
        unscored = jnp.zeros_like(found.probs[:, :, 0])
        outputs, _ = outputs_lib.append(
            before, tokens[:, None], jnp.ones_like(tokens), unscored, eos_id
        )
        here, draft_states = {"written": context.live, "betas": {}, "proposed": {}}, {}
        for name, draft in drafts.items():
            draft_probs, here["proposed"][name], draft_states[name] = _ask(
                draft, state.draft_state[name], context, tokens, outputs.lengths
            )
            betas = _betas(found.logits, found.probs, draft_probs, settings, leniences)
            here["betas"][name] = betas[..., 0]
        state = state.replace(
            outputs=outputs,
            target_cache=target.rollback(found.target_cache, outputs.lengths),
            draft_state=draft_states,
            target_states=with_states(state.target_states, found.states, before.lengths),
        )
        scores = jax.tree.map(lambda all, one: all.at[..., position].set(one), scores, here)
        return state, scores, position + 1

    _, scores, _ = lax.while_loop(
        lambda carry: ~done(carry[0]), score_position, (state, scores, jnp.int32(0))
    )
    return TextScores(**scores)


def _ask(draft: Draft, state: DraftState, context: Context, tokens, lengths):
    """Requests one token for each row from a draft, then commits the rows' next ``tokens``.

    Returns:
      The draft's distributions ``[batch, 1, vocab]``, a mask of rows that proposed, its state.
    """
    proposal, state = interfaces.proposed(draft, state, context, 1)
    proposes = (proposal.num_proposed > 0) & context.live
    accepted = proposes & (proposal.tokens[:, 0] == tokens)
    outcome = Outcome(lengths=lengths, num_accepted=accepted.astype(jnp.int32))
    return proposal.distributions(draft.vocab_size), proposes, draft.commit(state, outcome)


def _betas(logits, target_probs, draft_probs, settings: Sampling, leniences) -> Array:
    """Computes the acceptance rate for each lenience ``[leniences, batch, 1]``."""
    betas = []
    for lenience in leniences:
        if settings.greedy and lenience < 1:
            own = jax.nn.softmax(logits, axis=-1)
            betas.append(formulas.beta_of_lenient_argmax(own, draft_probs, lenience))
        else:
            betas.append(formulas.beta(target_probs, draft_probs, lenience))
    # Rounding may take a sum of probabilities above 1.
    return jnp.minimum(jnp.stack(betas), 1.0)
