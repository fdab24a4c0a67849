"""The hypotheses of a beam search, and the update that every search makes.

The rules are those of ``t5x.decoding.beam_search``. For each row:

* the ``2 * beams`` likeliest continuations of its live hypotheses are *candidates*:
  even if as many as ``beams`` of them end, as many go on (with several tokens that end a
  text, one more ``beams`` for each);
* a candidate that ends competes with the finished hypotheses by *score*, its
  log-probability divided by ``brevity_penalty``;
* the likeliest of the others are the new live hypotheses;
* the row ends at its limit, or once its likeliest live hypothesis could not displace
  the worst finished one, even if it went on for nothing until ``max_decode_len``;
* it returns its finished hypotheses or, if there is none, the live ones.

A ``TransformersRanking`` differs in three places:

* of the candidates that end, only the ``beams`` likeliest of all candidates count;
* a score is the log-probability divided by ``generated tokens ** length_penalty``, and at its limit
  a row takes the likeliest candidates as they are;
* the row also ends with its first ``beams`` finished hypotheses (``early_stopping``), or once the
  likeliest live one would not displace the worst of them at its present length.

Three things differ from T5X, so that a row gets what T5X gives for it alone:

* a row ends by itself. T5X goes on for as long as any row of the batch does, which adds
  nothing to a finished set unless alpha is negative (where the last bound is none);
* prompts of unequal lengths are prefilled (``initial_index`` there), but each row ends
  at its own limit. T5X lets the longer ones run beyond it, and cuts them;
* a hypothesis of probability zero is none. T5X marks empty places by a log-probability
  of -1e7, and hypotheses grow on them where a model has probabilities of zero.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.sampling.rules import Places, Rules
from spec_t5x.types import PAD_ID, Array, Bool, EndOfSequence, Float, Float32, Int

# The score of a place that no hypothesis fills, T5X's.
EMPTY_SCORE = -1.0e7


@flax.struct.dataclass(kw_only=True)
class Beams:
    """The hypotheses of each row, by increasing log-probability or score."""

    # Start token, prompt and generated tokens of the hypotheses that go on.
    live_sequences: Int[Array, "batch beams width"]
    # Log-probability of their generated tokens; minus infinity for an empty place.
    live_log_probs: Float32[Array, "batch beams"]
    # Tokens after the start token, the prompt's included: the same for all live ones.
    lengths: Int[Array, "batch"]
    # The prompts' lengths, and those at which rows end at the latest.
    starts: Int[Array, "batch"]
    limits: Int[Array, "batch"]
    # Hypotheses that have ended, their end-of-sequence token included.
    finished_sequences: Int[Array, "batch beams width"]
    # What they are ranked by; EMPTY_SCORE for an empty place.
    finished_scores: Float32[Array, "batch beams"]
    # Tokens after the start token; 0 for an empty place.
    finished_lengths: Int[Array, "batch beams"]
    # Rows that are done; they do not change any more.
    ended: Bool[Array, "batch"]

    @property
    def last_tokens(self) -> Int[Array, "batch beams"]:
        """The token at each live hypothesis's end: the next one to feed to a model."""
        at = self.lengths[:, None, None]
        return jnp.take_along_axis(self.live_sequences, at, axis=2)[:, :, 0]

    def places(
        self, sequences: Int[Array, "batch nodes width"], positions: Int[Array, "batch nodes"]
    ) -> Places:
        """Places at the ends of some hypotheses, for the rules of decoding."""
        return Places(tokens=sequences, lengths=positions, starts=self.starts, limits=self.limits)


@flax.struct.dataclass(kw_only=True)
class Ranking:
    """The order of hypotheses, and the point at which a search has found enough of them: T5X's."""

    # Exponent of the penalty on short texts (alpha).
    exponent: Float[Array, ""] | float = 0.6

    def penalty(
        self, lengths: Int[Array, "batch"], starts: Int[Array, "batch"]
    ) -> Float32[Array, "batch"]:
        """The divisor of the log-probabilities of hypotheses of these lengths."""
        return brevity_penalty(self.exponent, lengths)

    def counted(
        self, ends: Bool[Array, "batch top"], found: "Candidates", beams: "Beams"
    ) -> Bool[Array, "batch top"]:
        """The candidates, best first, that count as finished; ``ends`` are those that end."""
        return ends

    def is_settled(self, beams: "Beams") -> Bool[Array, "batch"]:
        """Tells, for each row, whether no live hypothesis can displace its worst finished one."""
        # The largest penalty that T5X reckons with; its sequences count the start token.
        longest = jnp.asarray(beams.live_sequences.shape[2])
        within_reach = beams.live_log_probs[:, -1] / brevity_penalty(self.exponent, longest)
        # False while there is an empty place.
        return jnp.min(beams.finished_scores, axis=1) > within_reach


@flax.struct.dataclass(kw_only=True)
class TransformersRanking(Ranking):
    """The rules of transformers; ``exponent`` is its ``length_penalty``."""

    # True ends a row with its first ``beams`` finished hypotheses; "never" bounds what a live
    # hypothesis may reach by the row's limit, False by its present length.
    early_stopping: bool | str = flax.struct.field(pytree_node=False, default=False)

    def penalty(self, lengths, starts):
        """A power of the number of generated tokens."""
        exponent = jnp.asarray(self.exponent, jnp.float32)
        return (lengths - starts).astype(jnp.float32) ** exponent

    def counted(self, ends, found, beams):
        """The ``beams`` likeliest candidates alone, and at its limit a row's as they are."""
        num = beams.live_log_probs.shape[1]
        is_last = beams.lengths + 1 >= beams.limits
        ends = ends | (is_last[:, None] & (found.log_probs > -jnp.inf))
        return ends & (jnp.arange(ends.shape[1]) < num)[None, :]

    def is_settled(self, beams):
        """By the penalty at the present length, unless ``early_stopping`` says otherwise."""
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
    """Counts for each input."""

    # Target calls before the row ended.
    target_calls: Int[Array, "batch"]
    # Tokens that its live hypotheses grew by: one for each call of a plain search.
    steps: Int[Array, "batch"]

    @property
    def block_efficiency(self) -> Array:
        """Tokens that the hypotheses grow by with each target call: 1 in a plain search.

        A row that took 12 steps in 5 calls has 12 / 5 = 2.4.
        """
        return self.steps / jnp.maximum(self.target_calls, 1)


@flax.struct.dataclass(kw_only=True)
class BeamResult:
    """The hypotheses found, in T5X's order: by increasing score within an input.

    A place that no hypothesis fills (fewer than ``beams`` have ended, but one has)
    holds padding, length 0 and the score -1e7.
    """

    # Prompt, generated tokens, the end-of-sequence token (if it was reached), padding.
    tokens: Int[Array, "batch beams length"]
    # Log-probability of the generated tokens (natural logarithm) over the ranking's
    # penalty; without the penalty where no hypothesis of the row has ended. NaN where the
    # target's logits were not finite, and the tokens mean nothing.
    scores: Float32[Array, "batch beams"]
    # Number of tokens, the prompt and the end-of-sequence token included.
    lengths: Int[Array, "batch beams"]
    stats: BeamStats


@flax.struct.dataclass(kw_only=True)
class Continuations:
    """The likeliest next tokens of some hypotheses, best first."""

    tokens: Int[Array, "batch nodes top"]
    log_probs: Float32[Array, "batch nodes top"]


@flax.struct.dataclass(kw_only=True)
class Candidates:
    """The likeliest continuations of all hypotheses of a row, best first."""

    # Which hypothesis each continues, and by which token.
    parents: Int[Array, "batch top"]
    tokens: Int[Array, "batch top"]
    # Of the whole hypothesis; minus infinity for none.
    log_probs: Float32[Array, "batch top"]


def start(
    prompts: Int[Array, "batch prompt"],
    beams: int,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None,
) -> Beams:
    """One live hypothesis in each row, its prompt (``prompts[:, 0]`` is the start token)."""
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


def brevity_penalty(
    alpha: float | Float[Array, ""], lengths: Int[Array, "*rows"]
) -> Float32[Array, "*rows"]:
    """``((5 + length) / 6) ** alpha``; 1 for texts of one token (arXiv 1609.08144)."""
    return ((5.0 + lengths) / 6.0) ** jnp.asarray(alpha, jnp.float32)


def num_candidates(beams: int, eos_id: EndOfSequence) -> int:
    """So many continuations that ``beams`` of them go on: of each hypothesis one or more end."""
    return (2 if not isinstance(eos_id, tuple) else 1 + len(eos_id)) * beams


def continuations(
    logits: Float32[Array, "batch nodes vocab"],
    num: int,
    rules: Rules | None = None,
    places: Places | None = None,
) -> Continuations:
    """The ``num_candidates`` likeliest tokens after each node: no other can be a candidate.

    Rules of decoding change log-probabilities, as in transformers, and not logits: the
    probabilities of the tokens that they leave do not sum to 1. ``places`` are the nodes'.
    """
    if rules is not None:
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        top, tokens = lax.top_k(rules(log_probs, places), num)
        return Continuations(tokens=tokens, log_probs=top)
    top, tokens = lax.top_k(logits, num)
    # Not top[..., :1]: with a slice of it, XLA's CPU backend sorts the whole vocabulary.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    log_norm = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    log_probs = top - largest - log_norm
    # Top-k puts a NaN first whose sign is positive, and any other last.
    log_probs = jnp.where(jnp.isnan(log_probs), jnp.nan, log_probs)
    return Continuations(tokens=tokens, log_probs=log_probs)


def candidates(log_probs: Float32[Array, "batch nodes"], following: Continuations) -> Candidates:
    """The ``num_candidates`` likeliest continuations in each row.

    ``log_probs`` are of the hypotheses continued; minus infinity for an empty place, which has
    no continuations.
    """
    batch, _, num = following.tokens.shape
    totals = log_probs[:, :, None] + following.log_probs
    totals = jnp.where(log_probs[:, :, None] == -jnp.inf, -jnp.inf, totals)
    best, at = lax.top_k(totals.reshape(batch, -1), num)
    return Candidates(
        parents=at // num, tokens=pick(following.tokens.reshape(batch, -1), at), log_probs=best
    )


def going_on(found: Candidates, beams: int, eos_id: EndOfSequence) -> Candidates:
    """The ``beams`` likeliest that do not end, by increasing log-probability."""
    log_probs = jnp.where(outputs_lib.ends(found.tokens, eos_id), -jnp.inf, found.log_probs)
    likeliest = _best(log_probs, beams)
    return Candidates(
        parents=pick(found.parents, likeliest),
        tokens=pick(found.tokens, likeliest),
        log_probs=pick(log_probs, likeliest),
    )


def extend(
    beams: Beams, following: Continuations, ranking: Ranking, eos_id: EndOfSequence
) -> tuple[Beams, Int[Array, "batch beams"]]:
    """One step of the search in every row that has not ended.

    ``following`` are the continuations of the live hypotheses. Returns the hypotheses after the
    step, and the place, before it, of the one that each live hypothesis continues.
    """
    num = beams.live_log_probs.shape[1]
    found = candidates(beams.live_log_probs, following)
    live = going_on(found, num, eos_id)
    lengths = beams.lengths + 1
    extended = beams.replace(
        live_sequences=continued(beams.live_sequences, live, lengths),
        live_log_probs=live.log_probs,
        lengths=lengths,
        **_finished(beams, found, lengths, ranking, eos_id),
    )
    settled = ranking.is_settled(extended) | (live.log_probs[:, -1] == -jnp.inf)
    extended = extended.replace(ended=(lengths >= extended.limits) | settled)
    return where_rows(beams.ended, beams, extended), live.parents


def _finished(
    beams: Beams, found: Candidates, lengths, ranking: Ranking, eos_id: EndOfSequence
) -> dict[str, Array]:
    """The best of the finished hypotheses and of the candidates that end."""
    ends = ranking.counted(outputs_lib.ends(found.tokens, eos_id), found, beams)
    penalty = ranking.penalty(lengths, beams.starts)[:, None]
    new_scores = jnp.where(ends, found.log_probs / penalty, EMPTY_SCORE)
    new_lengths = jnp.where(ends, lengths[:, None], 0)
    scores = jnp.concatenate([beams.finished_scores, new_scores], axis=1)
    # Of equals, the earlier: a candidate that goes on never takes an empty place, nor does
    # one of probability zero.
    best = _best(scores, beams.finished_scores.shape[1])
    return {
        "finished_scores": pick(scores, best),
        "finished_lengths": pick(
            jnp.concatenate([beams.finished_lengths, new_lengths], axis=1), best
        ),
        "finished_sequences": pick(
            jnp.concatenate(
                [beams.finished_sequences, continued(beams.live_sequences, found, lengths)], axis=1
            ),
            best,
        ),
    }


def finish(beams: Beams, stats: BeamStats) -> BeamResult:
    """The finished hypotheses of each row or, if there is none, the live ones."""
    is_live = beams.live_log_probs > -jnp.inf
    live = (
        jnp.where(is_live[:, :, None], beams.live_sequences, PAD_ID),
        jnp.where(is_live, beams.live_log_probs, EMPTY_SCORE),
        jnp.where(is_live, beams.lengths[:, None], 0),
    )
    finished = (beams.finished_sequences, beams.finished_scores, beams.finished_lengths)
    any_finished = jnp.any(beams.finished_lengths > 0, axis=1)
    sequences, scores, lengths = where_rows(any_finished, finished, live)
    # A NaN comes first in top-k (``continuations``): once there, it is there to the end.
    is_sound = ~jnp.any(jnp.isnan(beams.live_log_probs), axis=1, keepdims=True)
    scores = jnp.where(is_sound, scores, jnp.nan)
    return BeamResult(tokens=sequences[:, :, 1:], scores=scores, lengths=lengths, stats=stats)


def pick(values: Array, indices: Int[Array, "batch picked"]) -> Array:
    """``values[b, indices[b]]`` for each row b."""
    return jax.vmap(lambda row, at: row[at])(values, indices)


def where_rows(condition: Bool[Array, "batch"], chosen, other):
    """The rows of one tree where the condition holds, those of another elsewhere."""

    def select(one, two):
        return jnp.where(condition.reshape(-1, *[1] * (one.ndim - 1)), one, two)

    return jax.tree.map(select, chosen, other)


def continued(
    sequences: Int[Array, "batch nodes width"],
    tails: Candidates,
    positions: Int[Array, "batch"],
) -> Int[Array, "batch top width"]:
    """The sequences that the candidates continue, with their tokens at each row's position."""
    is_here = jnp.arange(sequences.shape[2])[None, :] == positions[:, None]
    sequences = pick(sequences, tails.parents)
    return jnp.where(is_here[:, None, :], tails.tokens[:, :, None], sequences)


def _best(values: Float32[Array, "batch n"], num: int) -> Int[Array, "batch num"]:
    """Indices of the largest values, by increasing value."""
    return lax.top_k(values, num)[1][:, ::-1]


def check_beams(name: str, beams: int, vocab_size: int, eos_id: EndOfSequence) -> None:
    """Raises ``InputError`` unless all candidates can be had from one hypothesis."""
    if beams < 1:
        raise InputError(f"{name} is {beams}: give at least 1")
    if num_candidates(beams, eos_id) > vocab_size:
        raise InputError(
            f"{name} is {beams} and the vocabulary has {vocab_size} tokens: "
            f"give at most {vocab_size // num_candidates(1, eos_id)}"
        )
