"""Rules of decoding, which exclude, force or reweight the tokens that may follow a text.

A rule is a function of the text before a *place*, a position whose token is to be chosen: a target
call applies it at each place of a block. Drafts and targets apply the same rules to their logits
before ``standardize``, so that speculative decoding stays exact for the target with its rules. The
rules, their order and their arithmetic are those of transformers' logits processors.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError, check_numbers, check_rules
from spec_t5x.types import PAD_ID, Array, Bool, Float, Float32, Int

# Pads phrases on the left, where it matches any token.
_ANY = -1


@flax.struct.dataclass(kw_only=True)
class Places:
    """Places of texts at which a token is to be chosen."""

    # The text that each place is in, or one for all of a row; the start token first.
    tokens: Int[Array, "batch #places width"]
    # Number of tokens between the start token and each place; tokens from the place on are ignored.
    lengths: Int[Array, "batch places"]
    # Length of each row's prompt, and the length at which the row ends at the latest.
    starts: Int[Array, "batch"]
    limits: Int[Array, "batch"]


@flax.struct.dataclass(kw_only=True)
class Rules:
    """Rules of decoding, each of which may be absent (None); ``rules`` makes them."""

    # Tokens that are never generated, and those that are not generated first.
    banned: Bool[Array, "vocab"] | None = None
    banned_first: Bool[Array, "vocab"] | None = None
    # The only token that may follow the start token.
    first: Int[Array, ""] | None = None
    # The only tokens allowed at the last position before a row's limit.
    last: Bool[Array, "vocab"] | None = None
    # Tokens that end a text, and the number of generated tokens below which they are excluded.
    ends: Bool[Array, "vocab"] | None = None
    min_decode_len: Int[Array, ""] | None = None
    # Divides the positive and multiplies the negative logits of tokens that are in the text.
    repetition_penalty: Float32[Array, ""] | None = None
    # Phrases, padded on the left (``_padded``), and the bias added to the logit of a phrase's last
    # token where the text ends with the phrase's other tokens.
    phrases: Int[Array, "phrases longest"] | None = None
    phrase_biases: Float32[Array, "phrases"] | None = None
    # Size n of the n-grams that no text may repeat; 0 for no rule.
    no_repeat_ngram_size: int = flax.struct.field(pytree_node=False, default=0)
    # Start token's id where rules compare it with tokens: the end token's if both are the same.
    start_id: int = flax.struct.field(pytree_node=False, default=PAD_ID)

    def __call__(
        self, logits: Float[Array, "batch places vocab"], places: Places
    ) -> Float32[Array, "batch places vocab"]:
        """Returns the logits (or log-probabilities) changed by the rules; -inf excludes a token."""
        logits = logits.astype(jnp.float32)
        vocab_size = logits.shape[-1]
        if self.phrases is not None:
            logits += self._biases(places, vocab_size)
        if self.repetition_penalty is not None:
            penalty = self.repetition_penalty
            changed = jnp.where(logits < 0, logits * penalty, logits / penalty)
            seen = _any_token(*self._text(places), vocab_size)
            logits = jnp.where(seen, changed, logits)
        logits = jnp.where(self._excluded(places, logits.shape), -jnp.inf, logits)
        for forced, allowed in self._forced(places, vocab_size):
            only = jnp.where(allowed, 0.0, -jnp.inf)[None, None, :]
            logits = jnp.where(forced[:, :, None], only, logits)
        return logits

    def _excluded(self, places: Places, shape: tuple[int, ...]) -> Bool[Array, "..."]:
        """Returns the mask of tokens that some rule excludes, ``[batch, places, vocab]``."""
        excluded = jnp.zeros(shape, bool)
        if self.banned is not None:
            excluded |= self.banned[None, None, :]
        generated = places.lengths - places.starts[:, None]
        if self.banned_first is not None:
            # If the first token is forced, the first choice is the second token.
            chosen = generated
            if self.first is not None:
                chosen = generated - (places.starts[:, None] == 0)
            excluded |= (chosen == 0)[:, :, None] & self.banned_first[None, None, :]
        if self.min_decode_len is not None:
            is_short = generated < self.min_decode_len
            excluded |= is_short[:, :, None] & self.ends[None, None, :]
        if self.no_repeat_ngram_size:
            excluded |= self._repeated(places, shape[-1])
        return excluded

    def _forced(self, places: Places, vocab_size: int):
        """Yields pairs of masks: forced places ``[batch, places]``, allowed tokens ``[vocab]``."""
        if self.first is not None:
            yield places.lengths == 0, jnp.arange(vocab_size) == self.first
        if self.last is not None:
            yield places.lengths == places.limits[:, None] - 1, self.last

    def _text(self, places: Places) -> tuple[Int[Array, "batch places width"], Array]:
        """Returns the tokens of each place's row, and the mask of those before the place."""
        shape = (*places.lengths.shape, places.tokens.shape[-1])
        indices = jnp.arange(shape[-1])[None, None, :]
        tokens = jnp.where(indices == 0, self.start_id, places.tokens)
        return jnp.broadcast_to(tokens, shape), indices <= places.lengths[:, :, None]

    def _repeated(self, places: Places, vocab_size: int) -> Bool[Array, "batch places vocab"]:
        """Returns the mask of tokens that would repeat an n-gram of the text."""
        size, (tokens, is_text) = self.no_repeat_ngram_size, self._text(places)
        num = tokens.shape[-1] - size + 1
        if num < 1:
            return jnp.zeros((*places.lengths.shape, vocab_size), bool)
        matches = is_text[..., size - 1 :]
        for offset in range(size - 1):
            # An n-gram's beginning is compared with the text's last ``size - 1`` tokens.
            at = jnp.maximum(places.lengths - (size - 2) + offset, 0)
            last = jnp.take_along_axis(tokens, at[:, :, None], axis=-1)
            matches &= tokens[..., offset : offset + num] == last
        return _any_token(tokens[..., size - 1 :], matches, vocab_size)

    def _biases(self, places: Places, vocab_size: int) -> Float32[Array, "batch places vocab"]:
        """Sums the biases of the phrases that each token would complete."""
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


def rules(
    vocab_size: int,
    eos_ids: Sequence[int],
    *,
    min_decode_len: int = 0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    forced_bos_token_id: int = -1,
    forced_eos_token_id: Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    sequence_bias: Sequence[tuple[Sequence[int], float]] = (),
    start_id: int = PAD_ID,
) -> Rules | None:
    """Returns the rules of decoding, or None if all values are neutral.

    Args:
      vocab_size: number of logits.
      eos_ids: tokens that end a text.
      min_decode_len: least number of tokens that are generated before one of ``eos_ids``.
      repetition_penalty: makes tokens of the text less likely if above 1; 1 is neutral.
      no_repeat_ngram_size: size of the n-grams that no text may repeat; 0 is neutral.
      suppress_tokens: tokens that are never generated.
      begin_suppress_tokens: tokens that are not generated first.
      forced_bos_token_id: the token that follows the start token; -1 is neutral.
      forced_eos_token_id: tokens, one of which is last in a text that reaches its limit.
      bad_words_ids: phrases that are never generated; one of ``eos_ids`` alone stays allowed.
      sequence_bias: phrases, each with the number added to the logit of its last token.
      start_id: the start token's id where rules compare it with tokens of the text.

    Raises:
      InputError: an id is not in the vocabulary, a phrase is empty, a value is out of range, or a
        forced token is suppressed.
    """
    words = [tuple(word) for word in bad_words_ids]
    # If a phrase is given twice, the last bias is used, as in transformers.
    phrases = {tuple(text): bias for text, bias in sequence_bias}
    forced = () if forced_bos_token_id == -1 else (forced_bos_token_id,)
    _check_ids(
        vocab_size,
        suppress_tokens=suppress_tokens,
        begin_suppress_tokens=begin_suppress_tokens,
        forced_bos_token_id=forced,
        forced_eos_token_id=forced_eos_token_id,
        bad_words_ids=itertools.chain(*words),
        sequence_bias=itertools.chain(*phrases),
    )
    check_rules(repetition_penalty, bad_words_ids=words, sequence_bias=phrases)
    check_numbers(0, min_decode_len=min_decode_len, no_repeat_ngram_size=no_repeat_ngram_size)
    last, banned = {*forced_eos_token_id}, {*suppress_tokens}
    for name, ids in {"forced_bos_token_id": {*forced}, "forced_eos_token_id": last}.items():
        # transformers would exclude every token at such a place.
        if ids and ids <= banned:
            raise InputError(f"{name} and suppress_tokens have {sorted(ids)}: leave one out")

    def mask(tokens: Sequence[int] | set[int]) -> Array | None:
        return jnp.asarray(np.isin(np.arange(vocab_size), list(tokens))) if len(tokens) else None

    single = [word[0] for word in words if len(word) == 1 and word[0] not in eos_ids]
    phrases |= {word: -np.inf for word in words if len(word) > 1}
    padded, biases = _padded(phrases) if phrases else (None, None)
    made = Rules(
        banned=mask([*suppress_tokens, *single]),
        banned_first=mask(begin_suppress_tokens),
        first=jnp.int32(forced_bos_token_id) if forced else None,
        last=mask(last - banned),
        ends=mask(eos_ids) if min_decode_len else None,
        min_decode_len=jnp.int32(min_decode_len) if min_decode_len else None,
        repetition_penalty=None if repetition_penalty == 1 else jnp.float32(repetition_penalty),
        phrases=padded,
        phrase_biases=biases,
        no_repeat_ngram_size=no_repeat_ngram_size,
        start_id=start_id,
    )
    return made if no_repeat_ngram_size or jax.tree.leaves(made) else None


def _check_ids(vocab_size: int, **ids: Iterable[int]) -> None:
    """Raises ``InputError`` for an id that is not in the vocabulary."""
    for name, tokens in ids.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"{name} has token {token} and the model {vocab_size} tokens: give lower ids"
                )


def _padded(phrases: Mapping[tuple[int, ...], float]) -> tuple[Array, Array]:
    """Returns ``Rules.phrases`` and their biases, padded so that similar sizes share programs."""
    num, longest = -(-len(phrases) // 16) * 16, -(-max(map(len, phrases)) // 4) * 4
    # A row without a phrase adds 0 to the last id's logit.
    texts, biases = np.full((num, longest), _ANY, np.int32), np.zeros(num, np.float32)
    for row, text in zip(texts, phrases, strict=False):
        row[longest - len(text) :] = text
    biases[: len(phrases)] = list(phrases.values())
    return jnp.asarray(texts), jnp.asarray(biases)


def _any_token(
    tokens: Int[Array, "batch places width"],
    counted: Bool[Array, "batch places width"],
    vocab_size: int,
) -> Bool[Array, "batch places vocab"]:
    """Returns the mask of ids that occur among each place's tokens where ``counted`` is true."""
    batch, num, _ = tokens.shape
    rows = jnp.arange(batch)[:, None, None]
    places = jnp.arange(num)[None, :, None]
    found = jnp.zeros((batch, num, vocab_size), bool)
    return found.at[rows, places, tokens].max(counted, mode="drop")
