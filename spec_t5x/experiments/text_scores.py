"""How likely drafts are to be accepted at every position of given texts.

Corollary 3.6 takes the expectation over texts that the target generated: no decoding is
needed, only both models' distributions after each prefix. The texts are fed to the target
a few tokens at a time, once for all drafts, and every draft proposes one token at each position.
"""

import functools
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.drafts.sequential import slices
from spec_t5x.interfaces import Cache, Context, Draft, DraftState, Outcome, Target
from spec_t5x.loops import autoregressive, speculative
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.draws import RowStream, draft_draws
from spec_t5x.theory import formulas
from spec_t5x.types import PAD_ID, Array, Bool, Float, Float32, Int, Key, PyTree

# Tokens fed at once: about as many as in verification, so that a cache needs no more room than
# in decoding.
CHUNK = 8


@flax.struct.dataclass(kw_only=True)
class TextScores:
    """The scores of one draft at each generated token of each text."""

    # How likely the draft is to be accepted, for each lenience.
    betas: Float32[Array, "leniences batch length"]
    # Whether it proposed anything; False beyond the end of the text.
    proposed: Bool[Array, "batch length"]

    def put(self, betas, proposed, offset) -> "TextScores":
        """With the values of the tokens from ``offset`` on."""
        return TextScores(
            betas=lax.dynamic_update_slice(self.betas, betas, (0, 0, offset)),
            proposed=lax.dynamic_update_slice(self.proposed, proposed, (0, offset)),
        )


@flax.struct.dataclass(kw_only=True)
class _Texts:
    """The texts, and the distribution that they were sampled from."""

    # Start token, prompt and text of each row, then padding.
    sequences: Int[Array, "batch width"]
    # Tokens after the start token: before the first that was generated, and at the end.
    starts: Int[Array, "batch"]
    lengths: Int[Array, "batch"]
    stream: RowStream
    settings: Sampling

    def at(self, offset) -> Int[Array, "batch"]:
        """The rows' lengths before the generated token ``offset``, at most the whole text."""
        return jnp.minimum(self.starts + offset, self.lengths)


@flax.struct.dataclass(kw_only=True)
class _Chunk:
    """``CHUNK`` positions of each text, as the target has read them."""

    # Of the first position among the generated tokens.
    offset: Int[Array, ""]
    # The token before each position.
    tokens: Int[Array, "batch chunk"]
    # Holds the tokens up to the last position.
    target_cache: Cache
    # The state that each of ``tokens`` was predicted from; None unless a draft uses it.
    states: Float[Array, "batch chunk embed"] | None


@flax.struct.dataclass(kw_only=True)
class _Progress:
    """What is carried from one chunk to the next."""

    target_cache: Cache
    # The target's last state; None unless a draft uses it.
    last_states: Float[Array, "batch embed"] | None
    drafts: dict[str, DraftState]
    scores: dict[str, TextScores]


@functools.partial(jax.jit, static_argnames="leniences")
def score_texts(
    target: Target,
    drafts: Mapping[str, Draft],
    inputs: PyTree,
    prompts: Int[Array, "batch prompt"],
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, "batch"],
    keys: Key[Array, "batch"],
    settings: Sampling,
    *,
    leniences: tuple[float, ...] = (1.0,),
) -> dict[str, TextScores]:
    """The acceptance rate of each draft at each generated token.

    Sampling: ``sum min(p / l, q)``. At temperature 0 with a lenience below 1: how likely
    the draft is to have ``p(x) >= l max(p)``, p at temperature 1 (section A.5).

    Args:
      target: the model that generated the texts.
      drafts: by any names; each may sample in its own way.
      inputs, prompts: what the texts were generated from.
      tokens: the texts, their prompts included (``Decoded.tokens``).
      lengths: their numbers of tokens.
      keys: a random key for each row, for drafts that draw.
      settings: how the target samples.
      leniences: l of section A.5; 1 is Algorithm 1.

    Raises:
      InputError: a draft with another vocabulary than the target's, or one that needs
        hidden states of a target that has none.
    """
    for draft in drafts.values():
        speculative.check_arguments(target, draft, prompts, 1, tokens.shape[1])
    starts = jnp.sum(prompts[:, 1:] != PAD_ID, axis=1, dtype=jnp.int32)
    padded = jnp.pad(tokens, ((0, 0), (0, CHUNK + 1)), constant_values=PAD_ID)
    texts = _Texts(
        sequences=jnp.concatenate([jnp.asarray(prompts[:, :1]), padded], axis=1),
        starts=starts,
        lengths=jnp.maximum(jnp.asarray(lengths), starts),
        stream=RowStream(keys),
        settings=settings,
    )
    uses_states = any(draft.uses_target_states for draft in drafts.values())
    batch, room = tokens.shape[0], tokens.shape[1] + CHUNK
    nothing = TextScores(
        betas=jnp.zeros((len(leniences), batch, room), jnp.float32),
        proposed=jnp.zeros((batch, room), bool),
    )
    progress = _Progress(
        target_cache=autoregressive.prefill(target, inputs, prompts, starts, room),
        last_states=jnp.zeros((batch, target.state_size), jnp.float32) if uses_states else None,
        drafts={name: draft.prefill(inputs, prompts, room) for name, draft in drafts.items()},
        scores=dict.fromkeys(drafts, nothing),
    )

    def score_chunk(index, progress):
        logits, chunk, progress = _read_target(target, texts, index * CHUNK, progress, uses_states)
        target_probs = standardize(logits, settings)
        states, scores = {}, {}
        for name, draft in drafts.items():
            draft_probs, proposed, states[name] = _read_draft(
                draft, progress.drafts[name], texts, chunk, target
            )
            betas = _betas(logits, target_probs, draft_probs, settings, leniences)
            scores[name] = progress.scores[name].put(betas, proposed, chunk.offset)
        return progress.replace(drafts=states, scores=scores)

    longest = jnp.max(texts.lengths - texts.starts)
    progress = lax.fori_loop(0, (longest + CHUNK - 1) // CHUNK, score_chunk, progress)
    written = jnp.arange(tokens.shape[1])[None, :] < (texts.lengths - texts.starts)[:, None]
    return {
        name: TextScores(
            betas=scores.betas[..., : tokens.shape[1]],
            proposed=scores.proposed[:, : tokens.shape[1]] & written,
        )
        for name, scores in progress.scores.items()
    }


def _read_target(target: Target, texts: _Texts, offset, progress: _Progress, uses_states: bool):
    """Feeds a chunk: the target's logits at its positions, the chunk, the progress."""
    at = texts.at(offset)
    tokens = slices(texts.sequences, at, CHUNK)
    cache = target.rollback(progress.target_cache, at)
    if not uses_states:
        logits, cache = target.score(cache, tokens)
        before = last = None
    else:
        logits, states, cache = target.score_states(cache, tokens)
        states = states.astype(jnp.float32)
        before = jnp.concatenate([progress.last_states[:, None], states[:, :-1]], axis=1)
        last = states[:, -1]
    chunk = _Chunk(offset=offset, tokens=tokens, target_cache=cache, states=before)
    return logits, chunk, progress.replace(target_cache=cache, last_states=last)


def _betas(logits, target_probs, draft_probs, settings: Sampling, leniences) -> Array:
    """The acceptance rate at each position, for each lenience ``[leniences, batch, chunk]``."""
    betas = []
    for lenience in leniences:
        if settings.greedy and lenience < 1:
            own = jax.nn.softmax(logits, axis=-1)
            betas.append(formulas.beta_of_lenient_argmax(own, draft_probs, lenience))
        else:
            betas.append(formulas.beta(target_probs, draft_probs, lenience))
    # Sums of probabilities, rounded.
    return jnp.minimum(jnp.stack(betas), 1.0)


def _read_draft(draft: Draft, state: DraftState, texts: _Texts, chunk: _Chunk, target: Target):
    """Lets a draft propose a token at each position, and commits the text's own.

    Returns:
      Its distributions ``[batch, chunk, vocab]``, where it proposed, and its state.
    """

    def ask(state, step):
        at, after = texts.at(chunk.offset + step), texts.at(chunk.offset + step + 1)
        context = Context(
            sequences=texts.sequences,
            lengths=at,
            live=at < texts.lengths,
            draws=draft_draws(texts.stream, at, coupled=False),
            settings=texts.settings,
            # Beyond a row's length the cache is not read.
            target_cache=target.rollback(chunk.target_cache, at),
            target_states=None if chunk.states is None else chunk.states[:, step],
        )
        proposal, state = draft.propose(state, context, 1)
        proposed = proposal.num_proposed > 0
        following = slices(texts.sequences, after, 1)[:, 0]
        kept = proposed & (proposal.tokens[:, 0] == following) & (after > at)
        outcome = Outcome(lengths=after, num_accepted=kept.astype(jnp.int32))
        probs = proposal.distributions(draft.vocab_size)[:, 0]
        return draft.commit(state, outcome), (probs, proposed)

    state, (probs, proposed) = lax.scan(ask, state, jnp.arange(CHUNK))
    return probs.swapaxes(0, 1), proposed.T, state
