"""A draft that copies tokens from the source, or from an earlier part of the output.

Corrections, rewrites and documents full of names take most of their output from the source. Each
row's *pointer* is the position in the source at which the output continues. The pointer advances
while output and source agree; after an edit it moves to where they agree again. The draft has no
model and no parameters (section 3.6; "input-guided" drafting of corrections: arXiv 2106.04970;
copying from a reference: arXiv 2304.04487).
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.drafts.kinds import DraftKind, Request, whole_number
from spec_t5x.errors import check_numbers
from spec_t5x.interfaces import Context, Draft, DraftTraits, Outcome, Proposal
from spec_t5x.types import PAD_ID, Array, Bool, Float32, Int


@flax.struct.dataclass(kw_only=True)
class CopyState:
    """State of a ``CopyDraft`` for each row."""

    # Tokens of the source, padding at the end.
    source: Int[Array, "*batch source"]
    # Position in the source of the token that should follow the output's first ``length`` tokens.
    pointer: Int[Array, "*batch"]
    length: Int[Array, "*batch"]
    # Mean number of accepted tokens of a proposal, in which each proposal halves the weight of
    # those before it, and the number of consecutive proposals without an accepted token.
    mean: Float32[Array, "*batch"]
    misses: Int[Array, "*batch"]
    # Number of tokens of the last proposal; 0 once it is verified.
    proposed: Int[Array, "*batch"]


@flax.struct.dataclass
class CopyDraft(Draft):
    """Draft that proposes the source's tokens from the pointer on, or repeats the output.

    If new tokens disagree with the source, the pointer moves behind the longest suffix of the
    output (up to ``max_match`` tokens) that occurs in the source; of several occurrences, to the
    one nearest to where the pointer would be if each token had replaced one. If nothing matches, a
    word is taken to have replaced a word: the pointer moves to the source's next word.

    If a longer suffix, of ``min_match`` tokens or more, occurred earlier in the output, the tokens
    after its last occurrence are proposed instead. A proposal has at most twice as many tokens as
    recent target calls appended. After ``patience`` consecutive proposals without an accepted
    token, tokens are proposed only after a match of ``min_match`` tokens.
    """

    vocab_size: int = flax.struct.field(pytree_node=False)
    min_match: int = flax.struct.field(pytree_node=False, default=1)
    max_match: int = flax.struct.field(pytree_node=False, default=8)
    # Mask of the tokens that begin a word, are punctuation or end the text, stored as bits so that
    # it is static and no parameter. If it is None, each token is a word.
    word_starts: Bool[Array, "vocab"] | list | bytes | None = flax.struct.field(
        pytree_node=False, default=None
    )
    # Consecutive proposals without an accepted token, after which a match is required.
    patience: int = flax.struct.field(pytree_node=False, default=2)

    # Copied tokens cost only their verification.
    traits = DraftTraits(varies=True, max_worthwhile=16)

    def __post_init__(self):
        check_numbers(1, min_match=self.min_match)
        check_numbers(self.min_match, max_match=self.max_match)
        check_numbers(0, patience=self.patience)
        if not isinstance(self.word_starts, bytes | None):
            starts = np.asarray(self.word_starts, bool)
            # A vocabulary may be smaller or larger than the model's.
            check_numbers(1, **{"the size of word_starts": starts.size})
            object.__setattr__(self, "word_starts", np.packbits(starts).tobytes())

    def prefill(
        self, inputs: Int[Array, "batch source"], prompts: Int[Array, "batch width"], max_length
    ) -> CopyState:
        """Returns a state with the source, ``inputs``, and each pointer at its first token."""
        zeros = jnp.zeros(prompts.shape[0], jnp.int32)
        source = jnp.pad(jnp.asarray(inputs, jnp.int32), ((0, 0), (0, 1)), constant_values=PAD_ID)
        mean = jnp.full(zeros.shape, jnp.inf, jnp.float32)
        return CopyState(
            source=source, pointer=zeros, length=zeros, mean=mean, misses=zeros, proposed=zeros
        )

    def propose(self, state: CopyState, context: Context, gamma: int) -> tuple[Proposal, CopyState]:
        """Proposes up to ``gamma`` tokens of each row's source or earlier output; 0 is possible."""
        limit = jnp.minimum(2 * (state.mean + 1), context.num_drafts(gamma)).astype(jnp.int32)
        of_row = jax.vmap(functools.partial(self._propose_row, gamma))
        tokens, counts, pointer = of_row(state, context.sequences, context.lengths, limit)
        # The first mean is infinite, and no proposal can have more than gamma accepted tokens.
        mean = jnp.minimum(state.mean, gamma)
        new = {"pointer": pointer, "length": context.lengths, "mean": mean, "proposed": counts}
        kept = {n: jnp.where(context.live, value, getattr(state, n)) for n, value in new.items()}
        return Proposal(tokens, counts=counts), state.replace(**kept)

    def commit(self, state: CopyState, outcome: Outcome) -> CopyState:
        """Records the accepted tokens of the rows that proposed something."""
        asked, accepted = state.proposed > 0, outcome.num_accepted
        missed = jnp.where(accepted > 0, 0, state.misses + 1)
        return state.replace(
            mean=jnp.where(asked, (state.mean + accepted) / 2, state.mean),
            misses=jnp.where(asked, missed, state.misses),
            proposed=jnp.zeros_like(state.proposed),
        )

    def _propose_row(
        self,
        gamma: int,
        state: CopyState,
        text: Int[Array, "width"],
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Int[Array, "gamma"], Int[Array, ""], Int[Array, ""]]:
        """Returns a row's tokens, the number of them that are proposed, and the new pointer."""
        source, source_end = state.source, jnp.sum(state.source != PAD_ID)
        in_source = self._match_lengths(source, text, length)
        pointer = self._pointer(state, source_end, in_source, text, length)
        matched = jnp.where(pointer > 0, in_source[jnp.maximum(pointer - 1, 0)], 0)
        in_text = self._match_lengths(text, text, length)
        in_text = jnp.where(jnp.arange(text.shape[0]) < length, in_text, 0)
        longest = jnp.max(in_text)
        # The last of several longest matches.
        place = in_text.shape[0] - 1 - jnp.argmax(in_text[::-1])
        from_text = (longest > matched) & (longest >= self.min_match)
        start = jnp.where(from_text, place + 1, pointer)
        end = jnp.where(from_text, length + 1, source_end)

        offsets = start + jnp.arange(gamma)
        of_text, of_source = (jnp.take(each, offsets, mode="clip") for each in (text, source))
        trusted = from_text | (state.misses < self.patience) | (matched >= self.min_match)
        count = jnp.where(trusted, jnp.clip(end - start, 0, limit), 0)
        return jnp.where(from_text, of_text, of_source), count, pointer

    def _pointer(
        self,
        state: CopyState,
        end: Int[Array, ""],
        in_source: Int[Array, "source"],
        text: Int[Array, "width"],
        length: Int[Array, ""],
    ) -> Int[Array, ""]:
        """Returns a row's pointer after the tokens that were appended since ``state``."""
        source, size, new = state.source, state.source.shape[0], length - state.length
        # The number of new tokens that agree with the source.
        at = jnp.arange(text.shape[0]) - state.length - 1
        expected = jnp.take(source, state.pointer + at, mode="fill", fill_value=PAD_ID)
        differs = (expected != text) | (expected == PAD_ID)
        num_agreeing = jnp.min(jnp.where((at >= 0) & (at < new) & differs, at, new))
        there = state.pointer + num_agreeing

        # A match at the source's end has nothing after it.
        places = jnp.arange(size)
        matches = jnp.where(places < end - 1, in_source, 0)
        distance = jnp.abs(places + 1 - (state.pointer + new))
        # Two places' distances differ by less than the source's size.
        matched = jnp.argmax(size * matches - distance) + 1
        replaced = self._after_word(source, end, there, text[length])
        edited = jnp.where(jnp.max(matches) > 0, matched, replaced)
        return jnp.where(num_agreeing == new, there, edited).astype(jnp.int32)

    def _after_word(self, source: Int[Array, "source"], end: Int[Array, ""], there, token):
        """Returns the next word's start after ``there``; ``there`` if ``token`` extends a word."""
        places, last = jnp.arange(source.shape[0]), jnp.maximum(end - 1, 0)
        starts, continues = jnp.ones(source.shape, bool), jnp.asarray(False)
        if self.word_starts is not None:
            table = jnp.asarray(np.unpackbits(np.frombuffer(self.word_starts, np.uint8)) > 0)
            starts = jnp.take(table, source, mode="clip")
            continues = ~jnp.take(table, token, mode="clip")
            continues &= starts[jnp.minimum(there, last)]
        # The source's last token, its end of sequence, can always be proposed.
        next_word = jnp.min(jnp.where(starts & (places > there) & (places < last), places, last))
        return jnp.where(continues, there, next_word)

    def _match_lengths(
        self, places: Int[Array, "length"], text: Int[Array, "width"], length: Int[Array, ""]
    ) -> Int[Array, "length"]:
        """Counts, for each token of ``places``, the tokens up to it that equal the text's last."""
        matches, still = jnp.zeros(places.shape, jnp.int32), jnp.ones(places.shape, bool)
        for back in range(min(self.max_match, places.shape[0])):
            wanted = text[jnp.maximum(length - back, 0)]
            shifted = jnp.pad(places, (back, 0), constant_values=PAD_ID)[: places.shape[0]]
            # Neither padding nor the start token, whose id is padding's, matches.
            still &= (shifted == wanted) & (wanted != PAD_ID)
            matches += still
        return matches


def copy_draft(request: Request, argument: str = "") -> CopyDraft:
    """Makes a ``CopyDraft`` whose ``min_match`` is the argument, by default 1."""
    min_match = int(argument or CopyDraft.min_match)
    vocabulary = request.target.vocabulary
    return CopyDraft(
        request.model.vocab_size,
        min_match,
        max(min_match, CopyDraft.max_match),
        None if vocabulary is None else vocabulary.word_starts(),
    )


KIND = DraftKind(make=copy_draft, draft=CopyDraft, check=whole_number, needs_network=False)
