"""Rules of decoding: tokens that may not, or must, follow a text, whatever a model computes.

A rule is a function of the text before a place, so that a verifier can apply it at each place of
a block. Drafts and targets apply the same rules to their logits before ``standardize``, and
speculative decoding stays exact: the target's distribution is the one that the rules leave. The
rules, their order and their arithmetic are those of transformers' logits processors.
"""

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.types import PAD_ID, Array, Bool, Float, Float32, Int

# Fills the places before a phrase that is shorter than the longest one.
_ANY = -1


@flax.struct.dataclass(kw_only=True)
class Places:
    """Places in texts, each of which a next token is asked for."""

    # Start token first; a place does not see the tokens beyond its length.
    tokens: Int[Array, "batch #places width"]
    # Tokens after the start token before each place.
    lengths: Int[Array, "batch places"]
    # Tokens of each row's prompt, and the length at which the row ends at the latest.
    starts: Int[Array, "batch"]
    limits: Int[Array, "batch"]


@flax.struct.dataclass(kw_only=True)
class Rules:
    """Rules of decoding, each of which may be absent (None). Make them with ``rules``."""

    # Tokens that never come, and those that are not the first one after the prompt.
    banned: Bool[Array, "vocab"] | None = None
    banned_first: Bool[Array, "vocab"] | None = None
    # The only token that may follow the start token.
    first: Int[Array, ""] | None = None
    # The only tokens that may come last, where a row ends at its limit.
    last: Bool[Array, "vocab"] | None = None
    # Tokens that end a text, and how many other tokens come before them at least.
    ends: Bool[Array, "vocab"] | None = None
    min_length: Int[Array, ""] | None = None
    # Divides the positive and multiplies the negative logits of tokens that the text has.
    repetition_penalty: Float32[Array, ""] | None = None
    # What is added to the logit of a phrase's last token where the others come before it; a
    # phrase is filled up from the left.
    phrases: Int[Array, "phrases longest"] | None = None
    phrase_biases: Float32[Array, "phrases"] | None = None
    # Number of tokens that no text has twice in this order; 0 for no such rule.
    no_repeat_ngram_size: int = flax.struct.field(pytree_node=False, default=0)
    # The start token's id within a text, where start and end are one token.
    start_id: int = flax.struct.field(pytree_node=False, default=PAD_ID)

    def __call__(
        self, logits: Float[Array, "batch places vocab"], places: Places
    ) -> Float32[Array, "batch places vocab"]:
        """The logits (or log-probabilities) by the rules; minus infinity is a token excluded."""
        logits = logits.astype(jnp.float32)
        if self.phrases is not None:
            logits += self._biases(places, logits.shape[-1])
        if self.repetition_penalty is not None:
            changed = jnp.where(
                logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty
            )
            logits = jnp.where(self._seen(places, logits.shape[-1]), changed, logits)
        excluded = self._excluded(places, logits.shape)
        logits = jnp.where(excluded, -jnp.inf, logits)
        for forced, allowed in self._forced(places, logits.shape[-1]):
            only = jnp.where(allowed, 0.0, -jnp.inf)[None, None, :]
            logits = jnp.where(forced[:, :, None], only, logits)
        return logits

    def _excluded(self, places: Places, shape: tuple[int, ...]) -> Bool[Array, "..."]:
        """Tokens that no rule lets follow, ``[batch, places, vocab]``."""
        excluded = jnp.zeros(shape, bool)
        if self.banned is not None:
            excluded |= self.banned[None, None, :]
        generated = places.lengths - places.starts[:, None]
        if self.banned_first is not None:
            # The token that is forced comes before the first that is chosen.
            chosen = generated
            if self.first is not None:
                chosen = generated - (places.starts[:, None] == 0)
            excluded |= (chosen == 0)[:, :, None] & self.banned_first[None, None, :]
        if self.min_length is not None:
            is_short = generated < self.min_length
            excluded |= is_short[:, :, None] & self.ends[None, None, :]
        if self.no_repeat_ngram_size:
            excluded |= self._repeated(places, shape[-1])
        return excluded

    def _forced(self, places: Places, vocab_size: int):
        """Places at which only some tokens are allowed, and those."""
        if self.first is not None:
            yield places.lengths == 0, jnp.arange(vocab_size) == self.first
        if self.last is not None:
            yield places.lengths == places.limits[:, None] - 1, self.last

    def _text(self, places: Places) -> tuple[Int[Array, "batch places width"], Array]:
        """The tokens around each place, and which of them are its text."""
        shape = (*places.lengths.shape, places.tokens.shape[-1])
        indices = jnp.arange(shape[-1])[None, None, :]
        tokens = jnp.where(indices == 0, self.start_id, places.tokens)
        return jnp.broadcast_to(tokens, shape), indices <= places.lengths[:, :, None]

    def _seen(self, places: Places, vocab_size: int) -> Bool[Array, "batch places vocab"]:
        """Tokens that the text has."""
        return _any_token(*self._text(places), vocab_size)

    def _repeated(self, places: Places, vocab_size: int) -> Bool[Array, "batch places vocab"]:
        """Tokens that would complete an n-gram which the text has already."""
        size, (tokens, is_text) = self.no_repeat_ngram_size, self._text(places)
        num = tokens.shape[-1] - size + 1
        if num < 1:
            return jnp.zeros((*places.lengths.shape, vocab_size), bool)
        matches = is_text[..., :num] & is_text[..., size - 1 :]
        for offset in range(size - 1):
            # The text's last tokens but one, in order: an n-gram's beginning.
            at = jnp.maximum(places.lengths - (size - 2) + offset, 0)
            last = jnp.take_along_axis(tokens, at[:, :, None], axis=-1)
            matches &= tokens[..., offset : offset + num] == last
        return _any_token(tokens[..., size - 1 :], matches, vocab_size)

    def _biases(self, places: Places, vocab_size: int) -> Float32[Array, "batch places vocab"]:
        """The biases of the phrases that each token would complete."""
        tokens, _ = self._text(places)
        longest = self.phrases.shape[1]
        at = places.lengths[:, :, None] - jnp.arange(longest - 2, -1, -1)[None, None, :]
        before = jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=-1)
        before = jnp.where(at >= 0, before, _ANY - 1)[:, :, None, :]
        wanted = self.phrases[None, None, :, :-1]
        completed = jnp.all((wanted == before) | (wanted == _ANY), axis=-1)
        added = jnp.where(completed, self.phrase_biases[None, None, :], 0.0)
        none = jnp.zeros((*added.shape[:2], vocab_size), jnp.float32)
        return none.at[:, :, self.phrases[:, -1]].add(added)


def apply(
    rules: Rules | None, logits: Float[Array, "batch places vocab"], places: Places
) -> Float[Array, "batch places vocab"]:
    """The logits by the rules, or as they are where there is no rule."""
    return logits if rules is None else rules(logits, places)


def rules(
    vocab_size: int,
    eos_ids: Sequence[int],
    *,
    min_length: int = 0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    forced_bos_token_id: int | None = None,
    forced_eos_token_id: Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    sequence_bias: Sequence[tuple[Sequence[int], float]] = (),
    start_id: int = PAD_ID,
) -> Rules | None:
    """The rules of decoding by their names in transformers; None where all are neutral.

    Args:
      vocab_size: number of logits.
      eos_ids: tokens that end a text.
      min_length: tokens that are generated before one of ``eos_ids`` may be.
      repetition_penalty: above 0; 1 is none.
      no_repeat_ngram_size: tokens that may come once in this order; 0 for any number of times.
      suppress_tokens: tokens that never come.
      begin_suppress_tokens: tokens that do not come first.
      forced_bos_token_id: the token that follows the start token.
      forced_eos_token_id: tokens of which one comes last, where a text reaches its limit.
      bad_words_ids: texts that never come; one of ``eos_ids`` alone stays allowed.
      sequence_bias: texts, and what is added to the logit of the last token of each.
      start_id: the token that every text begins with.

    Raises:
      InputError: a token that the model does not have, or a value out of its range.
    """
    single = [word[0] for word in bad_words_ids if len(word) == 1 and word[0] not in eos_ids]
    longer = [(tuple(word), -np.inf) for word in bad_words_ids if len(word) > 1]
    phrases = [*((tuple(text), bias) for text, bias in sequence_bias), *longer]
    ids = {
        "suppress_tokens": suppress_tokens,
        "begin_suppress_tokens": begin_suppress_tokens,
        "forced_bos_token_id": () if forced_bos_token_id is None else (forced_bos_token_id,),
        "forced_eos_token_id": forced_eos_token_id,
        "bad_words_ids": [token for word in bad_words_ids for token in word],
        "sequence_bias": [token for text, _ in sequence_bias for token in text],
    }
    for name, tokens in ids.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"{name} has token {token} and the model {vocab_size} tokens: give ids below it"
                )
    if not (np.isfinite(repetition_penalty) and repetition_penalty > 0):
        raise InputError(f"repetition_penalty is {repetition_penalty}: give a number above 0")
    for name, number in (
        ("min_length", min_length),
        ("no_repeat_ngram_size", no_repeat_ngram_size),
    ):
        if number < 0:
            raise InputError(f"{name} is {number}: give at least 0")
    if any(not text for text, _ in phrases) or any(not word for word in bad_words_ids):
        raise InputError("bad_words_ids or sequence_bias has a text of no tokens: leave it out")

    def mask(tokens: Sequence[int]) -> Array | None:
        if not len(tokens):
            return None
        found = np.zeros(vocab_size, bool)
        found[list(tokens)] = True
        return jnp.asarray(found)

    fields = {
        "banned": mask([*suppress_tokens, *single]),
        "banned_first": mask(begin_suppress_tokens),
        "first": None if forced_bos_token_id is None else jnp.int32(forced_bos_token_id),
        "last": mask(forced_eos_token_id),
        "min_length": jnp.int32(min_length) if min_length else None,
        "repetition_penalty": None if repetition_penalty == 1 else jnp.float32(repetition_penalty),
    }
    if phrases:
        longest = max(len(text) for text, _ in phrases)
        filled = [[_ANY] * (longest - len(text)) + list(text) for text, _ in phrases]
        fields["phrases"] = jnp.asarray(np.asarray(filled, np.int32))
        fields["phrase_biases"] = jnp.asarray(np.asarray([bias for _, bias in phrases], np.float32))
    if not no_repeat_ngram_size and all(value is None for value in fields.values()):
        return None
    return Rules(
        **fields,
        ends=mask(eos_ids) if min_length else None,
        no_repeat_ngram_size=no_repeat_ngram_size,
        start_id=start_id,
    )


def _any_token(
    tokens: Int[Array, "batch places width"],
    counted: Bool[Array, "batch places width"],
    vocab_size: int,
) -> Bool[Array, "batch places vocab"]:
    """Which ids are among the counted tokens of each place."""
    batch, num, _ = tokens.shape
    rows = jnp.arange(batch)[:, None, None]
    places = jnp.arange(num)[None, :, None]
    found = jnp.zeros((batch, num, vocab_size), bool)
    return found.at[rows, places, tokens].max(counted, mode="drop")
