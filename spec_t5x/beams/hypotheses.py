"""The hypotheses of a beam search, and the update that every step of a search makes.

The rules are those of ``t5x.decoding.beam_search``. For each row:

* the ``2 * beams`` likeliest continuations of its live hypotheses are *candidates*, so that at
  least ``beams`` of them do not end (a second id that ends a text makes it ``3 * beams``);
* a candidate that ends competes with the finished hypotheses by *score*, its log-probability
  divided by ``Ranking.penalty``;
* the likeliest of the other candidates are the new live hypotheses;
* the row ends at its limit, or once its likeliest live hypothesis could not displace the worst
  finished one, even if its log-probability stayed the same until ``max_decode_len``;
* the row returns its finished hypotheses or, if there is none, the live ones.

``TransformersRanking`` has other rules for scores and ends. In three points this module differs
from T5X, so that each row gets the result that T5X gives for the row alone:

* a row ends by itself. T5X continues while any row of the batch does, which adds no hypothesis to
  a finished set unless alpha is negative (then the bound above does not hold);
* prompts of unequal lengths are prefilled (``initial_index`` in T5X), but each row ends at its own
  limit. T5X decodes rows with longer prompts beyond the limit, and cuts them;
* a hypothesis of probability zero is dropped, and its entry is *empty*. T5X marks empty entries by
  a log-probability of -1e7, and continues them if a model has probabilities of zero.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import check_numbers
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.sampling.rules import Places, Rules
from spec_t5x.types import PAD_ID, Array, Bool, EndOfSequence, Float, Float32, Int, PyTree

# T5X's score of an empty entry.
EMPTY_SCORE = -1.0e7


@flax.struct.dataclass(kw_only=True)
class Beams:
    """Hypotheses of each row: live ones by increasing log-probability, finished ones by score."""

    # Start token, prompt and generated tokens of the live hypotheses.
    live_sequences: Int[Array, "batch beams width"]
    # Log-probability of their generated tokens; minus infinity for an empty entry.
    live_log_probs: Float32[Array, "batch beams"]
    # Tokens after the start token, the prompt's included: the same for all live hypotheses.
    lengths: Int[Array, "batch"]
    # Each row's prompt length, and the length at which it ends at the latest.
    starts: Int[Array, "batch"]
    limits: Int[Array, "batch"]
    # Hypotheses that have ended, their end-of-sequence token included.
    finished_sequences: Int[Array, "batch beams width"]
    # The ranking's scores; EMPTY_SCORE for an empty entry.
    finished_scores: Float32[Array, "batch beams"]
    # Tokens after the start token; 0 for an empty entry.
    finished_lengths: Int[Array, "batch beams"]
    # Rows that have ended and no longer change.
    ended: Bool[Array, "batch"]

    @property
    def last_tokens(self) -> Int[Array, "batch beams"]:
        """The last token of each live hypothesis, the next one to feed to a model."""
        at = self.lengths[:, None, None]
        return jnp.take_along_axis(self.live_sequences, at, axis=2)[:, :, 0]

    @property
    def finished(self) -> tuple[Array, Array, Array]:
        """Sequences, scores and lengths of the finished hypotheses."""
        return self.finished_sequences, self.finished_scores, self.finished_lengths


@flax.struct.dataclass(kw_only=True)
class Ranking:
    """T5X's rules for the score of a finished hypothesis and the end of a row's search."""

    # Exponent of the penalty on short texts (alpha).
    exponent: Float[Array, ""] | float = 0.6
    # Length that each row's longest text has with its start token; None takes that of the arrays.
    longest: Int[Array, "batch"] | None = None

    def penalty(
        self, lengths: Int[Array, "*rows"], starts: Int[Array, "batch"]
    ) -> Float32[Array, "*rows"]:
        """Returns the divisor of log-probabilities; ``lengths`` include the prompts' ``starts``.

        It is ``((5 + length) / 6) ** alpha``, 1 for texts of one token (arXiv 1609.08144).
        """
        return ((5.0 + lengths) / 6.0) ** jnp.asarray(self.exponent, jnp.float32)

    def counted(
        self, ends: Bool[Array, "batch top"], found: "Candidates", beams: Beams
    ) -> Bool[Array, "batch top"]:
        """Returns the mask of candidates to add to the finished; ``ends`` masks those that end."""
        return ends

    def is_settled(self, beams: Beams) -> Bool[Array, "batch"]:
        """Returns the mask of rows whose worst finished hypothesis no live one can displace."""
        # T5X takes the penalty of the longest sequence, in which it counts the start token.
        width = beams.live_sequences.shape[2]
        longest = jnp.asarray(width if self.longest is None else self.longest)
        within_reach = beams.live_log_probs[:, -1] / self.penalty(longest, beams.starts)
        # False while a finished entry is empty.
        return jnp.min(beams.finished_scores, axis=1) > within_reach


@flax.struct.dataclass(kw_only=True)
class TransformersRanking(Ranking):
    """The rules of transformers; ``exponent`` is its ``length_penalty``.

    Only the ``beams`` likeliest candidates may end. A score is the log-probability divided by
    ``generated tokens ** length_penalty``. At its limit a row counts the ``beams`` likeliest
    candidates as finished. With ``beams`` finished hypotheses it may end by ``early_stopping``.
    """

    # True ends a row with its first ``beams`` finished hypotheses. Else a row ends when its
    # likeliest live hypothesis scores no better than the worst finished one, at its present
    # length (False) or, for a positive exponent, at the row's limit ("never").
    early_stopping: bool | str = flax.struct.field(pytree_node=False, default=False)

    def penalty(self, lengths, starts):
        """Returns ``generated tokens ** length_penalty``."""
        return (lengths - starts).astype(jnp.float32) ** jnp.asarray(self.exponent, jnp.float32)

    def counted(self, ends, found, beams):
        """Returns the mask of the ``beams`` likeliest that end: at a row's limit, of all."""
        num = beams.live_log_probs.shape[1]
        is_last = beams.lengths + 1 >= beams.limits
        ends = ends | (is_last[:, None] & (found.log_probs > -jnp.inf))
        return ends & (jnp.arange(ends.shape[1]) < num)[None, :]

    def is_settled(self, beams):
        """Returns the mask of rows whose search ends by the rule of ``early_stopping``."""
        is_full = jnp.all(beams.finished_lengths > 0, axis=1)
        if self.early_stopping is True:
            return is_full
        penalty = self.penalty(beams.lengths, beams.starts)
        if self.early_stopping == "never":
            at_last = self.penalty(beams.limits, beams.starts)
            penalty = jnp.where(jnp.asarray(self.exponent) > 0, at_last, penalty)
        within_reach = beams.live_log_probs[:, -1] / penalty
        return is_full & (jnp.min(beams.finished_scores, axis=1) >= within_reach)


@flax.struct.dataclass(kw_only=True)
class BeamStats:
    """Counts for each input's search."""

    # Target calls before the row ended.
    target_calls: Int[Array, "batch"]
    # Steps of the search, each of one token; plain search makes one in each call.
    steps: Int[Array, "batch"]

    @property
    def block_efficiency(self) -> Array:
        """Steps for each target call: 1 in a plain search, 12 / 5 for 12 steps in 5 calls."""
        return self.steps / jnp.maximum(self.target_calls, 1)


@flax.struct.dataclass(kw_only=True)
class BeamResult:
    """Hypotheses found, in T5X's order: by increasing score within an input.

    If fewer than ``beams`` were found, an empty entry has padding as tokens, length 0 and the
    score -1e7.
    """

    # Prompt, generated tokens, the end-of-sequence token (if it was reached), padding.
    tokens: Int[Array, "batch beams length"]
    # Log-probability of the generated tokens (natural logarithm) divided by the ranking's penalty;
    # undivided if no hypothesis of the row has ended. NaN if the target's logits were not finite:
    # then the tokens are meaningless.
    scores: Float32[Array, "batch beams"]
    # Number of tokens, the prompt and the end-of-sequence token included.
    lengths: Int[Array, "batch beams"]
    stats: BeamStats


@flax.struct.dataclass(kw_only=True)
class Continuations:
    """The likeliest next tokens after each node, best first, with their log-probabilities."""

    tokens: Int[Array, "batch nodes top"]
    log_probs: Float32[Array, "batch nodes top"]


@flax.struct.dataclass(kw_only=True)
class Candidates:
    """The likeliest continuations of all hypotheses of a row, best first."""

    # Index of the hypothesis that each candidate continues, and the token that it adds.
    parents: Int[Array, "batch top"]
    tokens: Int[Array, "batch top"]
    # Log-probabilities of the whole hypotheses; minus infinity where there is no hypothesis.
    log_probs: Float32[Array, "batch top"]


def start(
    prompts: Int[Array, "batch prompt"],
    beams: int,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None,
) -> Beams:
    """Returns the first state: each row's one live hypothesis is its prompt, start token first."""
    rows = outputs_lib.start(prompts, max_decode_len, max_decode_steps, room=0)
    batch, width = rows.sequences.shape
    # The likeliest hypothesis is the last one.
    log_probs = jnp.where(jnp.arange(beams) == beams - 1, 0.0, -jnp.inf)
    return Beams(
        live_sequences=jnp.repeat(rows.sequences[:, None], beams, axis=1),
        live_log_probs=jnp.tile(log_probs[None], (batch, 1)),
        lengths=rows.lengths,
        starts=rows.starts,
        limits=rows.limits,
        finished_sequences=jnp.full((batch, beams, width), PAD_ID, jnp.int32),
        finished_scores=jnp.full((batch, beams), EMPTY_SCORE, jnp.float32),
        finished_lengths=jnp.zeros((batch, beams), jnp.int32),
        ended=rows.ended,
    )


def num_candidates(beams: int, eos_id: EndOfSequence) -> int:
    """Returns the number of a row's candidates, of which at least ``beams`` do not end."""
    return (2 if not isinstance(eos_id, tuple) else 1 + len(eos_id)) * beams


def check_beams(vocab_size: int, eos_id: EndOfSequence, least: int = 1, **beams: int) -> None:
    """Raises ``InputError`` unless the vocabulary has enough tokens for so many hypotheses."""
    check_numbers(least, vocab_size // num_candidates(1, eos_id), **beams)


def continuations(
    logits: Float32[Array, "batch nodes vocab"],
    num: int,
    rules: Rules | None = None,
    places: Places | None = None,
) -> Continuations:
    """Returns the ``num`` likeliest tokens after each node, where ``num`` is ``num_candidates``.

    Rules of decoding change log-probabilities, as in transformers, and not logits, so that the
    probabilities of allowed tokens do not sum to 1. ``places`` are the nodes' (for ``rules``).
    """
    if rules is not None:
        ruled = rules(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), places)
        top, tokens = lax.top_k(_with_nan_first(ruled), num)
        return Continuations(tokens=tokens, log_probs=top)
    top, tokens = lax.top_k(logits, num)
    # Not top[..., :1]: with a slice of it, XLA's CPU backend sorts the whole vocabulary.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    log_norm = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    return Continuations(tokens=tokens, log_probs=_with_nan_first(top - largest - log_norm))


def _with_nan_first(log_probs: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Makes each NaN positive: top-k puts a positive one first, and a negative one last."""
    return jnp.where(jnp.isnan(log_probs), jnp.nan, log_probs)


def candidates(log_probs: Float32[Array, "batch nodes"], following: Continuations) -> Candidates:
    """Returns the likeliest continuations of each row, as many as ``following`` has for a node.

    ``log_probs`` are those of the continued hypotheses; minus infinity marks an empty entry,
    which has no continuations.
    """
    batch, _, num = following.tokens.shape
    totals = log_probs[:, :, None] + following.log_probs
    totals = jnp.where(log_probs[:, :, None] == -jnp.inf, -jnp.inf, totals)
    best, at = lax.top_k(totals.reshape(batch, -1), num)
    return Candidates(
        parents=at // num, tokens=pick(following.tokens.reshape(batch, -1), at), log_probs=best
    )


def live_candidates(found: Candidates, beams: int, eos_id: EndOfSequence) -> Candidates:
    """Returns the ``beams`` likeliest candidates that do not end, the likeliest last."""
    log_probs = jnp.where(outputs_lib.ends(found.tokens, eos_id), -jnp.inf, found.log_probs)
    return pick(found.replace(log_probs=log_probs), _best(log_probs, beams))


def extend(
    beams: Beams, following: Continuations, ranking: Ranking, eos_id: EndOfSequence
) -> tuple[Beams, Int[Array, "batch beams"]]:
    """Makes one step of the search in every row; the caller keeps those that have ended.

    ``following`` are the continuations of the live hypotheses. Returns the state after the step,
    and for each new live hypothesis the index of its parent among the old ones.
    """
    num = beams.live_log_probs.shape[1]
    found, lengths = candidates(beams.live_log_probs, following), beams.lengths + 1
    live = live_candidates(found, num, eos_id)

    ends = ranking.counted(outputs_lib.ends(found.tokens, eos_id), found, beams)
    scores = found.log_probs / ranking.penalty(lengths, beams.starts)[:, None]
    ending = (
        candidate_sequences(beams.live_sequences, found, lengths),
        jnp.where(ends, scores, EMPTY_SCORE),
        jnp.where(ends, lengths[:, None], 0),
    )
    finished = jax.tree.map(
        lambda old, new: jnp.concatenate([old, new], axis=1), beams.finished, ending
    )
    # Top-k prefers the earlier of equals: a candidate that does not end, or has probability
    # zero, never replaces an empty entry.
    sequences, scores, finished_lengths = pick(finished, _best(finished[1], num))

    extended = beams.replace(
        live_sequences=candidate_sequences(beams.live_sequences, live, lengths),
        live_log_probs=live.log_probs,
        lengths=lengths,
        finished_sequences=sequences,
        finished_scores=scores,
        finished_lengths=finished_lengths,
    )
    settled = ranking.is_settled(extended) | (live.log_probs[:, -1] == -jnp.inf)
    return extended.replace(ended=(lengths >= extended.limits) | settled), live.parents


def finish(beams: Beams, stats: BeamStats) -> BeamResult:
    """Returns the finished hypotheses of each row or, if there is none, the live ones."""
    is_live = beams.live_log_probs > -jnp.inf
    live = (
        jnp.where(is_live[:, :, None], beams.live_sequences, PAD_ID),
        jnp.where(is_live, beams.live_log_probs, EMPTY_SCORE),
        jnp.where(is_live, beams.lengths[:, None], 0),
    )
    any_finished = jnp.any(beams.finished_lengths > 0, axis=1)
    sequences, scores, lengths = where_rows(any_finished, beams.finished, live)
    # A NaN is first in every top-k (``continuations``), so it is still among the live ones.
    is_sound = ~jnp.any(jnp.isnan(beams.live_log_probs), axis=1, keepdims=True)
    scores = jnp.where(is_sound, scores, jnp.nan)
    return BeamResult(tokens=sequences[:, :, 1:], scores=scores, lengths=lengths, stats=stats)


def pick(tree: PyTree, indices: Int[Array, "batch picked"]) -> PyTree:
    """Returns ``values[b, indices[b]]`` for each row b of each leaf."""
    pick_rows = jax.vmap(lambda row, at: row[at])
    return jax.tree.map(lambda leaf: pick_rows(leaf, indices), tree)


def where_rows(condition: Bool[Array, "batch"], chosen: PyTree, other: PyTree) -> PyTree:
    """Returns the rows of ``chosen`` where ``condition`` is True, and of ``other`` elsewhere."""

    def select(one, two):
        return jnp.where(condition.reshape(-1, *[1] * (one.ndim - 1)), one, two)

    return jax.tree.map(select, chosen, other)


def candidate_sequences(
    sequences: Int[Array, "batch nodes width"], tails: Candidates, positions: Int[Array, "batch"]
) -> Int[Array, "batch top width"]:
    """Returns each candidate's sequence: its parent's, with its token at the row's position."""
    is_here = jnp.arange(sequences.shape[2])[None, :] == positions[:, None]
    sequences = pick(sequences, tails.parents)
    return jnp.where(is_here[:, None, :], tails.tokens[:, :, None], sequences)


def _best(values: Float32[Array, "batch n"], num: int) -> Int[Array, "batch num"]:
    """Returns the indices of the ``num`` largest values, by increasing value."""
    return lax.top_k(values, num)[1][:, ::-1]
