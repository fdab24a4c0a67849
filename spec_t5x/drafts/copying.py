"""Copying: the source goes on where the output has come to, or what followed the same words before.

Corrections, rewrites and documents full of names hold most of their output in the source. A pointer
for each row says where in the source the output goes on. It moves with the tokens that agree, and
after an edit it is put where the source agrees again. No model, no parameters (section 3.6;
"Input-guided" drafting of corrections: arXiv 2106.04970; for decoders alone, which have no source,
what is left is prompt lookup: arXiv 2304.04487).
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.drafts.kinds import DraftKind, Request, whole_number
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, DraftTraits, Outcome, Proposal
from spec_t5x.types import PAD_ID, Array, Bool, Float32, Int


@flax.struct.dataclass(kw_only=True)
class CopyState:
    """What a ``CopyDraft`` keeps of each row."""

    # The source it copies from.
    source: Int[Array, "batch source"]
    # Where in it the output goes on after its first ``length`` tokens.
    pointer: Int[Array, "batch"]
    length: Int[Array, "batch"]
    # The record: accepted tokens of a proposal, a mean that halves the weight of all earlier ones,
    # and how many of the last proposals in a row were wrong from the start.
    mean: Float32[Array, "batch"]
    misses: Int[Array, "batch"]
    # Tokens of the last proposal.
    proposed: Int[Array, "batch"]


@flax.struct.dataclass
class CopyDraft(Draft):
    """Proposes the source from the pointer on, or the output's own repetition.

    After tokens that disagree with the source, the pointer goes to where the longest suffix of the
    output (up to ``max_match`` tokens) is followed in the source; of several such places, to the
    nearest to where it would be had a token been replaced by a token. Where nothing matches, a
    word is taken to be replaced by a word: the pointer goes to the source's next word.

    A longer suffix that stands in the output before is preferred: what followed it, the last time,
    is proposed then. A proposal has up to twice as many tokens as target calls have brought lately;
    after ``patience`` that were wrong from the start, only what follows a match of ``min_match``
    tokens is proposed.
    """

    vocab_size: int = flax.struct.field(pytree_node=False)
    min_match: int = flax.struct.field(pytree_node=False, default=1)
    max_match: int = flax.struct.field(pytree_node=False, default=8)
    # Which tokens begin a word, are punctuation or end the text, as ``np.packbits`` packs them: no
    # parameter, so that a model's tree has none. None takes each token for a word.
    word_starts: bytes | None = flax.struct.field(pytree_node=False, default=None)
    # Proposals in a row of which nothing was accepted, after which a match is asked for.
    patience: int = flax.struct.field(pytree_node=False, default=2)

    # Where it has been wrong and nothing matches, nothing is proposed. Its tokens cost nothing but
    # their verification.
    traits = DraftTraits(varies=True, max_worthwhile=16)

    def __post_init__(self):
        if not 1 <= self.min_match <= self.max_match:
            raise InputError(
                f"min_match is {self.min_match} and max_match {self.max_match}: "
                "give 1 <= min_match <= max_match"
            )

    def prefill(
        self, inputs: Int[Array, "batch source"], prompts: Int[Array, "batch width"], max_length
    ) -> CopyState:
        """Keeps the encoder's tokens, points to the first, and expects the best."""
        zeros = jnp.zeros(prompts.shape[0], jnp.int32)
        return CopyState(
            # A decoder alone has no source: then this is padding.
            source=jnp.pad(
                jnp.asarray(inputs, jnp.int32), ((0, 0), (0, 1)), constant_values=PAD_ID
            ),
            pointer=zeros,
            length=zeros,
            mean=jnp.full(zeros.shape, jnp.inf, jnp.float32),
            misses=zeros,
            proposed=zeros,
        )

    def propose(self, state: CopyState, context: Context, gamma: int) -> tuple[Proposal, CopyState]:
        """Up to ``gamma`` tokens of the source, or of the output."""
        limit = jnp.minimum(2 * (state.mean + 1), context.num_drafts(gamma)).astype(jnp.int32)
        tokens, counts, pointer = jax.vmap(functools.partial(self._propose_row, gamma))(
            state.source,
            state.pointer,
            state.length,
            state.misses,
            context.sequences,
            context.lengths,
            limit,
        )
        state = state.replace(
            pointer=pointer,
            length=context.lengths,
            # What was expected beyond gamma could not be shown.
            mean=jnp.minimum(state.mean, gamma),
            proposed=counts,
        )
        # Certain of what it copies, at any temperature.
        return Proposal(tokens, counts=counts), state

    def commit(self, state: CopyState, outcome: Outcome) -> CopyState:
        """Enters what was accepted into the record of the rows that proposed something."""
        asked, accepted = state.proposed > 0, outcome.num_accepted
        missed = jnp.where(accepted > 0, 0, state.misses + 1)
        return state.replace(
            mean=jnp.where(asked, (state.mean + accepted) / 2, state.mean),
            misses=jnp.where(asked, missed, state.misses),
        )

    def _propose_row(
        self,
        gamma: int,
        source: Int[Array, "source"],
        pointer: Int[Array, ""],
        seen: Int[Array, ""],
        misses: Int[Array, ""],
        sequence: Int[Array, "width"],
        length: Int[Array, ""],
        limit: Int[Array, ""],
    ) -> tuple[Int[Array, "gamma"], Int[Array, ""], Int[Array, ""]]:
        """Tokens of one row, how many of them it proposes, and the pointer now."""
        source_end = jnp.sum(source != PAD_ID)
        in_source = self._match_lengths(source, sequence, length)
        pointer = self._pointer(source, source_end, in_source, pointer, seen, sequence, length)
        matched = jnp.where(pointer > 0, in_source[jnp.maximum(pointer - 1, 0)], 0)
        in_text = self._match_lengths(sequence, sequence, length)
        in_text = jnp.where(_before(sequence, length), in_text, 0)
        longest = jnp.max(in_text)
        # The last of the longest.
        place = in_text.shape[0] - 1 - jnp.argmax(in_text[::-1])
        from_text = (longest > matched) & (longest >= self.min_match)
        start = jnp.where(from_text, place + 1, pointer)
        end = jnp.where(from_text, length + 1, source_end)

        offsets = start + jnp.arange(gamma)
        tokens = jnp.where(
            from_text,
            jnp.take(sequence, offsets, mode="clip"),
            jnp.take(source, offsets, mode="clip"),
        )
        trusted = from_text | (misses < self.patience) | (matched >= self.min_match)
        return tokens, jnp.where(trusted, jnp.clip(end - start, 0, limit), 0), pointer

    def _pointer(
        self,
        source: Int[Array, "source"],
        end: Int[Array, ""],
        in_source: Int[Array, "source"],
        pointer: Int[Array, ""],
        seen: Int[Array, ""],
        sequence: Int[Array, "width"],
        length: Int[Array, ""],
    ) -> Int[Array, ""]:
        """Where the source goes on; ``pointer`` is where it did when ``seen`` tokens were there."""
        size, new = source.shape[0], length - seen
        # How many of the new tokens are the source's own.
        at = jnp.arange(sequence.shape[0]) - seen - 1
        expected = jnp.take(source, pointer + at, mode="fill", fill_value=PAD_ID)
        differs = (expected != sequence) | (expected == PAD_ID)
        num_agreeing = jnp.min(jnp.where((at >= 0) & (at < new) & differs, at, new))
        there = pointer + num_agreeing

        # A match that ends the source has nothing after it.
        followed = _before(source, end - 1)
        matches = jnp.where(followed, in_source, 0)
        distance = jnp.abs(jnp.arange(size) + 1 - (pointer + new))
        matched = jnp.argmax(2 * size * matches - jnp.minimum(distance, 2 * size - 1)) + 1
        replaced = self._after_word(source, end, there, sequence[length])
        edited = jnp.where(jnp.max(matches) > 0, matched, replaced)
        return jnp.where(num_agreeing == new, there, edited).astype(jnp.int32)

    def _after_word(self, source: Int[Array, "source"], end: Int[Array, ""], there, token):
        """The place of the next word, or ``there`` where the token goes on with a word."""
        places, last = jnp.arange(source.shape[0]), jnp.maximum(end - 1, 0)
        starts, goes_on = jnp.ones(source.shape, bool), jnp.asarray(False)
        if self.word_starts is not None:
            table = jnp.asarray(np.unpackbits(np.frombuffer(self.word_starts, np.uint8)) > 0)
            starts = jnp.take(table, source, mode="clip")
            goes_on = ~jnp.take(table, token, mode="clip")
            goes_on &= starts[jnp.minimum(there, source.shape[0] - 1)]
        # The source's last token ends it, and stays to be proposed.
        next_word = jnp.min(jnp.where(starts & (places > there) & (places < last), places, last))
        return jnp.where(goes_on, there, next_word)

    def _match_lengths(
        self, text: Int[Array, "length"], sequence: Int[Array, "width"], length: Int[Array, ""]
    ) -> Int[Array, "length"]:
        """How many tokens up to each place of ``text`` equal the last ones of the row."""
        matches, still = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
        for back in range(min(self.max_match, text.shape[0])):
            wanted = sequence[jnp.maximum(length - back, 0)]
            shifted = jnp.pad(text, (back, 0), constant_values=PAD_ID)[: text.shape[0]]
            # Padding and the start token match nothing.
            still &= (shifted == wanted) & (wanted != PAD_ID) & (length - back > 0)
            matches += still
        return matches


def _before(text: Int[Array, "length"], end) -> Bool[Array, "length"]:
    return jnp.arange(text.shape[0]) < end


def copy_draft(request: Request, argument: str = "") -> CopyDraft:
    """The draft that copies after a match of so many tokens."""
    min_match = whole_number("copy", argument) if argument else CopyDraft.min_match
    vocabulary = request.target.vocabulary
    return CopyDraft(
        request.model.vocab_size,
        min_match,
        max(min_match, CopyDraft.max_match),
        None if vocabulary is None else np.packbits(vocabulary.word_starts()).tobytes(),
    )


KIND = DraftKind(make=copy_draft, needs_network=False, has_temperature=False)
