"""Copying: what followed the same words before, in the source or in the output.

The longest recent suffix of the output is looked up in the encoder's source and in the
output so far; what followed it there is proposed. For summaries, edits and documents
full of names this is the cheapest draft there is: no model, no parameters (section 3.6;
for decoders alone: prompt lookup, "Inference with reference", arXiv 2304.04487).
"""

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, Proposal
from spec_t5x.types import PAD_ID, Array, Bool, Int


@flax.struct.dataclass
class CopyState:
    """What a ``CopyDraft`` keeps: the source it copies from."""

    source: Int[Array, "batch source"]


@flax.struct.dataclass
class CopyDraft(Draft):
    """Proposes the continuation of the longest match; nothing where there is none.

    A match ends with the row's last token and is at least ``min_match`` tokens long;
    more than ``max_match`` tokens are not looked at. Of several longest matches the
    output's come before the source's, and the last one counts.
    """

    vocab_size: int = flax.struct.field(pytree_node=False)
    min_match: int = flax.struct.field(pytree_node=False, default=1)
    max_match: int = flax.struct.field(pytree_node=False, default=8)

    # Where nothing matches, nothing is proposed.
    varies = True

    def __post_init__(self):
        if not 1 <= self.min_match <= self.max_match:
            raise InputError(
                f"min_match is {self.min_match} and max_match {self.max_match}: "
                "give 1 <= min_match <= max_match"
            )

    def prefill(
        self, inputs: Int[Array, "batch source"], prompts: Int[Array, "batch width"], max_length
    ) -> CopyState:
        """Keeps the encoder's tokens."""
        return CopyState(jnp.asarray(inputs, jnp.int32))

    def propose(self, state: CopyState, context: Context, gamma: int) -> tuple[Proposal, CopyState]:
        """Up to ``gamma`` tokens that followed the longest match."""
        tokens, counts = jax.vmap(self._propose_row, (0, 0, 0, None))(
            state.source, context.sequences, context.lengths, gamma
        )
        # Certain of what it copies, at any temperature.
        return Proposal(tokens, counts=counts), state

    def _propose_row(
        self,
        source: Int[Array, "source"],
        sequence: Int[Array, "width"],
        length: Int[Array, ""],
        gamma: int,
    ) -> tuple[Int[Array, "gamma"], Int[Array, ""]]:
        in_source = self._match_lengths(source, sequence, length)
        # Matching ends before the padding, and a match that ends the source has nothing
        # after it.
        source_end = jnp.sum(source != PAD_ID)
        in_source = jnp.where(_before(source, source_end - 1), in_source, 0)
        in_text = self._match_lengths(sequence, sequence, length)
        in_text = jnp.where(_before(sequence, length), in_text, 0)

        lengths = jnp.concatenate([in_source, in_text])
        longest = jnp.max(lengths)
        indices = jnp.arange(lengths.shape[0])
        best = jnp.max(jnp.where(lengths == longest, indices, 0))
        from_text = best >= source.shape[0]
        start = jnp.where(from_text, best - source.shape[0], best) + 1
        end = jnp.where(from_text, length + 1, source_end)

        offsets = start + jnp.arange(gamma)
        tokens = jnp.where(
            from_text,
            jnp.take(sequence, offsets, mode="clip"),
            jnp.take(source, offsets, mode="clip"),
        )
        counts = jnp.clip(end - start, 0, gamma)
        return tokens, jnp.where(longest >= self.min_match, counts, 0).astype(jnp.int32)

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
