"""The rows being written: what every decoding loop shares.

End of sequence, length limits, forced prompts, scores and the rows' random keys
mean the same in the plain loop, in the speculative one and in T5X.
"""

import functools
import inspect
import operator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.sampling.distributions import write_rows
from spec_t5x.sampling.draws import RowStream, Stream, T5XStream
from spec_t5x.sampling.rules import Places
from spec_t5x.types import PAD_ID, Array, Bool, EndOfSequence, Float32, Int, Key

# What to do about logits that are not finite.
UNSOUND = "check the weights, or compute in float32"


@flax.struct.dataclass
class Outputs:
    """Sequences under way. ``room`` is the most tokens that one append may bring."""

    # Start token, prompt, generated tokens, then padding. Wider than the longest
    # output by ``room``: a block is written whole and cut by ``lengths``.
    sequences: Int[Array, "batch width"]
    # Tokens after the start token, the prompt's included.
    lengths: Int[Array, "batch"]
    # The prompts' lengths: tokens beyond them are generated.
    starts: Int[Array, "batch"]
    # The length at which a row ends without an end-of-sequence token.
    limits: Int[Array, "batch"]
    # Rows that are done; they append nothing more.
    ended: Bool[Array, "batch"]
    # Sum of the log-probabilities of the generated tokens.
    scores: Float32[Array, "batch"]

    @property
    def last_tokens(self) -> Int[Array, "batch"]:
        """The token at each row's end: the next one to feed to a model."""
        return jnp.take_along_axis(self.sequences, self.lengths[:, None], axis=1)[:, 0]

    @property
    def ends(self) -> Places:
        """The place at each row's end, for the rules of decoding."""
        return Places(
            tokens=self.sequences[:, None],
            lengths=self.lengths[:, None],
            starts=self.starts,
            limits=self.limits,
        )


@flax.struct.dataclass
class Decoded:
    """Finished sequences, in T5X's order: by increasing score within an input."""

    # Generated tokens, the prompt first, the end-of-sequence token last, padding.
    tokens: Int[Array, "inputs decodes length"]
    # Log-probability of the generated tokens (natural logarithm); not finite where the
    # target's logits were not, and the tokens mean nothing.
    scores: Float32[Array, "inputs decodes"]
    # Number of tokens, the prompt and the end-of-sequence token included.
    lengths: Int[Array, "inputs decodes"]
    # The loop's statistics for each sequence (None from the plain loop).
    stats: object = None
    # The pace as it is now, to decode the next batch with (None where there was none).
    pace: object = None


def start(
    prompts: Int[Array, "batch width"],
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None,
    room: int,
) -> Outputs:
    """Rows that hold their prompts (``prompts[:, 0]`` is the start token)."""
    batch, width = prompts.shape
    lengths = prompt_lengths(prompts)
    limits = jnp.full(batch, max_decode_len, jnp.int32)
    if max_decode_steps is not None:
        limits = jnp.minimum(limits, lengths + max_decode_steps)
    sequences = jnp.full((batch, 1 + max_decode_len + room), PAD_ID, jnp.int32)
    return Outputs(
        sequences=lax.dynamic_update_slice(sequences, prompts, (0, 0)),
        lengths=lengths,
        starts=lengths,
        limits=limits,
        ended=lengths >= limits,
        scores=jnp.zeros(batch, jnp.float32),
    )


def prompt_lengths(prompts: Int[Array, "batch width"]) -> Int[Array, "batch"]:
    """How many tokens follow each row's start token."""
    return jnp.sum(prompts[:, 1:] != PAD_ID, axis=1, dtype=jnp.int32)


def ends(tokens: Int[Array, "*shape"], eos_id: EndOfSequence) -> Bool[Array, "*shape"]:
    """Whether each token is ``eos_id``, or one of them."""
    ids = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    return functools.reduce(operator.or_, [tokens == one for one in ids])


def append(
    outputs: Outputs,
    tokens: Int[Array, "batch room"],
    counts: Int[Array, "batch"],
    log_probs: Float32[Array, "batch room"],
    eos_id: EndOfSequence,
) -> tuple[Outputs, Int[Array, "batch"]]:
    """Appends the first ``counts[b]`` tokens to each row that has not ended.

    A row takes nothing after an end-of-sequence token or beyond its limit, and
    ends there. Returns the rows and how many tokens each of them took.
    """
    room = tokens.shape[1]
    offsets = jnp.arange(room)[None, :]
    first_eos = jnp.min(jnp.where(ends(tokens, eos_id), offsets, room), axis=1)
    taken = jnp.minimum(jnp.minimum(counts, first_eos + 1), outputs.limits - outputs.lengths)
    taken = jnp.where(outputs.ended, 0, taken)
    is_taken = offsets < taken[:, None]

    lengths = outputs.lengths + taken
    ended = outputs.ended | (first_eos < taken) | (lengths >= outputs.limits)
    tokens = jnp.where(is_taken, tokens, PAD_ID)
    sequences = write_rows(outputs.sequences, tokens, outputs.lengths + 1)
    scores = outputs.scores + jnp.sum(jnp.where(is_taken, log_probs, 0.0), axis=1)
    return outputs.replace(sequences=sequences, lengths=lengths, ended=ended, scores=scores), taken


def finish(
    outputs: Outputs, num_decodes: int, max_decode_len: int, stats=None, pace=None
) -> Decoded:
    """Cuts the start token off, groups by input and sorts by increasing score."""

    def group(rows):
        # Spelt out: an axis of size 0 (statistics at gamma 0) rules out -1.
        return rows.reshape(rows.shape[0] // num_decodes, num_decodes, *rows.shape[1:])

    scores = group(outputs.scores)
    # The last is taken for the best: not one without a score.
    order = jnp.argsort(jnp.where(jnp.isnan(scores), -jnp.inf, scores), axis=1, stable=True)

    def arrange(rows):
        grouped = group(rows)
        return jax.vmap(lambda row, indices: row[indices])(grouped, order)

    return Decoded(
        tokens=arrange(outputs.sequences[:, 1 : 1 + max_decode_len]),
        scores=arrange(outputs.scores),
        lengths=arrange(outputs.lengths),
        stats=jax.tree.map(arrange, stats),
        pace=pace,
    )


def repeat_rows(tree, times: int):
    """Each row ``times`` times in a row: ``num_decodes`` samples for each input.

    What has a ``repeat_rows(times)`` of its own, in the tree, sees to it itself.
    """
    if times == 1:
        return tree

    def repeat(node):
        own = getattr(node, "repeat_rows", None)
        return jnp.repeat(node, times, axis=0) if own is None else own(times)

    return jax.tree.map(repeat, tree, is_leaf=lambda node: hasattr(node, "repeat_rows"))


def row_keys(rng: Key[Array, "*batch"], batch: int, num_decodes: int = 1) -> Key[Array, "rows"]:
    """A key for each row, in the order of ``repeat_rows``.

    Args:
      rng: one key, from which row b takes ``fold_in(rng, b)``; or ``[batch]`` keys
        of the caller's, which make a row's output independent of its place in the batch.
      batch: number of inputs.
      num_decodes: sequences for each input.
    """
    if rng.ndim == 0:
        rng = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(batch))
    if num_decodes == 1:
        return rng
    fold_decodes = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(fold_decodes, (0, None))(rng, jnp.arange(num_decodes)).reshape(-1)


def row_stream(
    rng: Key[Array, "*batch"] | Stream,
    batch: int,
    num_decodes: int,
    coupled: bool,
    num_steps: int,
) -> Stream:
    """The stream of a loop over ``batch * num_decodes`` rows, up to ``num_steps`` tokens.

    Raises:
      InputError: T5X's chain of keys, without the coupled draws that it serves, for
        another number of rows, or with too few steps.
    """
    if isinstance(rng, RowStream):
        return rng
    if isinstance(rng, T5XStream):
        if not coupled:
            raise InputError("T5X's chain of keys has one draw a step: use the coupled verifier")
        rows, steps = rng.starts.shape[0], rng.steps.shape[0]
        if rows != batch * num_decodes or steps < num_steps:
            raise InputError(
                f"T5X's chain of keys is for {rows} rows and {steps} steps: make it for "
                f"{batch * num_decodes} rows and {num_steps} steps"
            )
        return rng
    return RowStream(row_keys(rng, batch, num_decodes))


def refuses_holes(jitted):
    """The compiled function, called with ``prompts`` in which no token follows padding.

    Padding ends a prompt: what came after it would be lost. Only before compilation can
    this be seen; prompts that are traced by an outer program are the caller's to check.
    """
    place = list(inspect.signature(jitted).parameters).index("prompts")

    @functools.wraps(jitted)
    def checked(*args, **kwargs):
        prompts = kwargs["prompts"] if "prompts" in kwargs else args[place]
        check_whole(prompts)
        return jitted(*args, **kwargs)

    checked.lower, checked.trace = jitted.lower, jitted.trace
    return checked


def check_whole(prompts) -> None:
    """Raises ``InputError`` where padding comes before a token, if the tokens are known."""
    if isinstance(prompts, jax.core.Tracer) or not getattr(prompts, "is_fully_addressable", True):
        return
    hole = first_hole(prompts) if prompts.ndim == 2 else None
    if hole is not None:
        row = np.asarray(prompts)[hole].tolist()
        raise InputError(f"prompt {hole} is {row}: give padding (0) at its end alone")


def first_hole(prompts) -> int | None:
    """The first row of known prompts in which padding comes before a token; None without."""
    is_token = np.asarray(prompts)[:, 1:] != PAD_ID
    # A prefix never rises again.
    holes = np.flatnonzero((np.diff(is_token.astype(np.int8), axis=1) > 0).any(axis=1))
    return int(holes[0]) if holes.size else None


def check_sound(scores: Float32[np.ndarray, "rows"]) -> None:
    """Raises ``InputError`` where a row has a score that is not finite."""
    for row in np.flatnonzero(~np.isfinite(scores)):
        raise InputError(
            f"the target's logits are not finite in row {row} (score {scores[row]}): {UNSOUND}"
        )


def check_prompts(prompts, max_decode_len: int) -> None:
    """Raises ``InputError`` unless ``prompts [batch, width]`` can be forced."""
    if prompts.ndim != 2 or prompts.shape[1] < 1:
        raise InputError(f"prompts have shape {prompts.shape}: give [batch, 1 + prompt length]")
    if prompts.shape[1] > 1 + max_decode_len:
        raise InputError(
            f"prompts hold {prompts.shape[1] - 1} tokens and max_decode_len is "
            f"{max_decode_len}: raise max_decode_len or shorten the prompts"
        )
