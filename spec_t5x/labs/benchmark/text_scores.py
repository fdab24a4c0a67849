"""How likely drafts are to be accepted at every position of the target's texts.

Corollary 3.6 takes the expectation over texts that the target generates: no proposal needs to be
verified. In one pass the target generates, every draft proposes one token at each position, and
both models' distributions stand side by side.
"""

import functools
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Context, Draft, DraftState, Outcome, Target, shown_to
from spec_t5x.loops import autoregressive, speculative
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.decode_state import first_states, with_states
from spec_t5x.loops.outputs import Outputs
from spec_t5x.sampling import rules
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.draws import RowStream, draft_draws, sample_next
from spec_t5x.theory import formulas
from spec_t5x.types import EOS_ID, Array, Bool, EndOfSequence, Float32, Int, Key, PyTree

# Beyond the longest text: what a target call and a draft may write there.
_ROOM = 2


@flax.struct.dataclass(kw_only=True)
class TextScores:
    """Scores at each generated token of each text, counted from the first one after the prompt."""

    # Whether there is a token: texts end at different lengths.
    written: Bool[Array, "batch length"]
    # By the draft's name: how likely it is to be accepted, for each lenience.
    betas: dict[str, Float32[Array, "leniences batch length"]]
    # By the draft's name: whether it proposed anything.
    proposed: dict[str, Bool[Array, "batch length"]]


@flax.struct.dataclass(kw_only=True)
class _State:
    """All that one position hands to the next."""

    outputs: Outputs
    # Holds every token of a row but its last one.
    target_cache: Cache
    # The target's states; None unless a draft uses them.
    target_states: Float32[Array, "batch positions embed"] | None
    drafts: dict[str, DraftState]
    # How many positions have been scored, and their scores.
    position: Int[Array, ""]
    scores: TextScores


@functools.partial(jax.jit, static_argnames=("max_decode_len", "leniences", "eos_id"))
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
    """The acceptance rate of each draft at each token that the target generates.

    Sampling: ``sum min(p / l, q)``. At temperature 0 with a lenience below 1: how likely
    the draft is to have ``p(x) >= l max(p)``, p at temperature 1 (section A.5).

    Args:
      target: the model that generates the texts.
      drafts: by any names; each may sample in its own way.
      inputs, prompts: what the texts are generated from, as in ``autoregressive_decode``.
      keys: a random key for each row; the texts are those of ``autoregressive_decode``.
      settings: how the target samples.
      max_decode_len: room for tokens, the prompt's included.
      max_decode_steps: tokens to generate at most, after the prompt.
      texts: given texts in place of the target's, their prompts included; as many positions
        as ``max_decode_len``.
      leniences: l of section A.5; 1 is Algorithm 1.
      eos_id: the token that ends a text, or several.

    Raises:
      InputError: a draft with another vocabulary than the target's, or one that needs
        hidden states of a target that has none.
    """
    for draft in drafts.values():
        speculative.check_arguments(target, draft, prompts, 1, max_decode_len)
    uses_states = any(draft.traits.uses_target_states for draft in drafts.values())
    target = _shown_to_all(drafts, target)
    stream, batch = RowStream(keys), prompts.shape[0]
    outputs = outputs_lib.start(prompts, max_decode_len, max_decode_steps, room=_ROOM)
    length = max_decode_len + _ROOM
    betas = jnp.zeros((len(leniences), batch, max_decode_len), jnp.float32)
    nowhere = jnp.zeros((batch, max_decode_len), bool)
    cache = autoregressive.prefill(target, inputs, prompts, outputs.lengths, length)
    state = _State(
        outputs=outputs,
        target_cache=cache,
        target_states=first_states(target, cache, prompts, length) if uses_states else None,
        drafts={name: draft.prefill(inputs, prompts, length) for name, draft in drafts.items()},
        position=jnp.int32(0),
        scores=TextScores(
            written=nowhere,
            betas=dict.fromkeys(drafts, betas),
            proposed=dict.fromkeys(drafts, nowhere),
        ),
    )

    def score_position(state: _State) -> _State:
        before, cache, scores = state.outputs, state.target_cache, state.scores
        context = Context(
            sequences=before.sequences,
            lengths=before.lengths,
            live=~before.ended,
            draws=draft_draws(stream, before.lengths, coupled=False),
            settings=settings,
            target_cache=cache,
            target_states=state.target_states,
            starts=before.starts,
            limits=before.limits,
        )
        logits, states, cache = target.score(cache, before.last_tokens[:, None])
        logits = rules.apply(settings.rules, logits, before.ends)
        probs = standardize(logits, settings)
        if texts is None:
            tokens = sample_next(stream, before.lengths, probs[:, 0], settings, False)
        else:
            at = jnp.minimum(before.lengths, max_decode_len - 1)
            tokens = jnp.take_along_axis(jnp.asarray(texts), at[:, None], axis=1)[:, 0]
        unscored = jnp.zeros_like(probs[:, :, 0])
        outputs, _ = outputs_lib.append(
            before, tokens[:, None], jnp.ones_like(tokens), unscored, eos_id
        )
        betas, proposed, draft_states = {}, {}, {}
        for name, draft in drafts.items():
            draft_probs, proposes, draft_states[name] = _ask(
                draft, state.drafts[name], context, tokens, outputs.lengths
            )
            found = _betas(logits, probs, draft_probs, settings, leniences)[..., 0]
            betas[name] = scores.betas[name].at[..., state.position].set(found)
            proposed[name] = scores.proposed[name].at[:, state.position].set(proposes)
        written = scores.written.at[:, state.position].set(context.live)
        return _State(
            outputs=outputs,
            target_cache=target.rollback(cache, outputs.lengths),
            target_states=with_states(state.target_states, states, before.lengths),
            drafts=draft_states,
            position=state.position + 1,
            scores=TextScores(written=written, betas=betas, proposed=proposed),
        )

    state = lax.while_loop(lambda state: ~jnp.all(state.outputs.ended), score_position, state)
    return state.scores


def _shown_to_all(drafts: Mapping[str, Draft], target: Target) -> Target:
    """The target with the states that any draft wants; one that wants fewer takes the first."""
    deepest = max(drafts.values(), key=lambda draft: len(draft.traits.depths), default=None)
    for name, draft in drafts.items():
        if draft.traits.depths != deepest.traits.depths[: len(draft.traits.depths)]:
            raise InputError(
                f"draft {name} wants the target's layers {list(draft.traits.depths)} and another "
                f"{list(deepest.traits.depths)}: measure them one by one"
            )
    return target if deepest is None else shown_to(deepest, target)


def _ask(draft: Draft, state: DraftState, context: Context, tokens, lengths):
    """Lets a draft propose a token, and commits the text's own.

    Returns:
      Its distribution ``[batch, 1, vocab]``, in which rows it proposed, and its state.
    """
    proposal, state = draft.propose(state, context, 1)
    proposes = (proposal.num_proposed > 0) & context.live
    accepted = proposes & (proposal.tokens[:, 0] == tokens)
    outcome = Outcome(lengths=lengths, num_accepted=accepted.astype(jnp.int32))
    return proposal.distributions(draft.vocab_size), proposes, draft.commit(state, outcome)


def _betas(logits, target_probs, draft_probs, settings: Sampling, leniences) -> Array:
    """The acceptance rate at each position, for each lenience ``[leniences, batch, 1]``."""
    betas = []
    for lenience in leniences:
        if settings.greedy and lenience < 1:
            own = jax.nn.softmax(logits, axis=-1)
            betas.append(formulas.beta_of_lenient_argmax(own, draft_probs, lenience))
        else:
            betas.append(formulas.beta(target_probs, draft_probs, lenience))
    # Sums of probabilities, rounded.
    return jnp.minimum(jnp.stack(betas), 1.0)
