"""An output layer that knows some tokens only: the likely ones, for a draft.

Of a small draft with a large vocabulary the output layer is most of each step, and most of
what it scores is never said. A draft may leave tokens out: the target says them where they
are due, at the price of a rejection (Zhao et al. 2025, FR-Spec, arXiv 2502.14856). Tokens
that are left out have the logit minus infinity, so that all else sees a whole vocabulary.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.models import weights
from spec_t5x.models.layers import Dense
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID, Array, Bool, Float, Float32, Int, PyTree


@flax.struct.dataclass
class NarrowHead:
    """Which tokens the layer knows; how it scores them are parameters."""

    # Of the tokens that it knows, increasing.
    ids: Int[Array, "known"]
    # Whether it knows each token of the vocabulary.
    knows: Bool[Array, "vocab"]

    @classmethod
    def create(cls, ids: Int[Array, "known"], vocab_size: int) -> "NarrowHead":
        """The layer of these tokens.

        Raises:
          InputError: ids that are not increasing, or outside of the vocabulary.
        """
        ids = np.asarray(ids, np.int32)
        if not ids.size or np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
            raise InputError(
                f"a narrow head of {ids.size} ids for a vocabulary of {vocab_size}: give "
                "increasing ids of it"
            )
        knows = np.zeros(vocab_size, bool)
        knows[ids] = True
        return cls(ids=jnp.asarray(ids), knows=jnp.asarray(knows))

    def logits(
        self,
        kernel: weights.Form | Float[Array, "embed known"],
        states: Float[Array, "batch length embed"],
    ) -> Float32[Array, "batch length vocab"]:
        """Of all tokens, from the decoder's normed states."""
        dense = Dense(self.ids.shape[0], ("embed", "vocab"), parent=None)
        known = dense.apply({"params": {"kernel": kernel}}, states)
        # On a CPU three times as fast as to gather them.
        unknown = jnp.full((*states.shape[:2], self.knows.shape[0]), -jnp.inf)
        where = {"unique_indices": True, "indices_are_sorted": True, "mode": "promise_in_bounds"}
        return unknown.at[..., self.ids].set(known, **where)


@flax.struct.dataclass
class NarrowT5(T5Model):
    """A ``T5Model`` with a narrow output layer in place of its own, which it need not have."""

    head: NarrowHead = flax.struct.field(kw_only=True)
    kernel: weights.Form | Float[Array, "embed known"] = flax.struct.field(kw_only=True)

    @classmethod
    def narrowed(cls, model: T5Model, head: NarrowHead, kernel) -> "NarrowT5":
        """The model with another output layer."""
        kernel = model.operations.packed("kernel", jnp.asarray(kernel))
        return cls(model.weights, model.module, model.operations, head=head, kernel=kernel)

    def rounded(self, bits: int = 8) -> "NarrowT5":
        """As of ``T5Model``, the narrow layer too."""
        kernel = weights.rounded({"kernel": self.kernel}, bits, tied=False)["kernel"]
        return super().rounded(bits).replace(kernel=kernel)

    def logits(self, states: Float[Array, "batch new embed"]) -> Float32[Array, "batch new vocab"]:
        """The narrow layer's."""
        return self.head.logits(self.kernel, states)


def check_number(number: int, vocab_size: int) -> None:
    """Raises ``InputError`` for a number of known tokens not from 1 to below ``vocab_size``."""
    if not 1 <= number < vocab_size:
        raise InputError(
            f"a narrow head of {number} of {vocab_size} tokens: give 1 to {vocab_size - 1}"
        )


def likeliest_ids(tokens: Int[Array, "tokens"], number: int, vocab_size: int) -> np.ndarray:
    """The most frequent tokens of some texts, increasing; end of sequence is one of them.

    Args:
        tokens: of all texts.
        number: how many to give.
        vocab_size: ids that there are.

    Raises:
        InputError: ``number`` is not from 1 to below ``vocab_size``.
    """
    check_number(number, vocab_size)
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size)
    counts[PAD_ID], counts[EOS_ID] = -1, counts.max() + 1
    # Of tokens as frequent as one another, those of lower ids, as vocabularies have them.
    return np.sort(np.argsort(-counts, kind="stable")[:number]).astype(np.int32)


def narrowed_params(own: PyTree, params: PyTree, config: T5Config, ids) -> PyTree:
    """A draft's own parameters with a narrow output layer, which begins as its whole one.

    Args:
        own: see ``kept_layers.own_params``.
        params, config: all of the draft's.
        ids: of the tokens to know ``[known]``.

    Returns:
        ``own`` with ``{"narrow_head": {"kernel": [embed, known]}}``, where the decoder has no
        output layer of its own.
    """
    kernel = output_kernel(params, config)[:, ids]
    decoder = {name: each for name, each in own["decoder"].items() if name != "logits_dense"}
    return {**own, "decoder": decoder, "narrow_head": {"kernel": kernel}}


def output_kernel(params: PyTree, config: T5Config) -> Float[Array, "embed vocab"]:
    """The output layer of a T5, which may be its embedding."""
    if config.logits_via_embedding:
        # Which rescales its states.
        return params["token_embedder"]["embedding"].T * config.output_scale
    return params["decoder"]["logits_dense"]["kernel"]
