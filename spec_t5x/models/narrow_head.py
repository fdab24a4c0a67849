"""An output layer for the likely tokens alone, for a draft.

The output layer is most of each step of a small draft with a large vocabulary, and most tokens
that it scores never occur. A draft may leave tokens out: the target generates them where they
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
    """Tokens that the layer knows; the scores' kernel is a parameter."""

    # Known tokens, increasing.
    ids: Int[Array, "known"]
    # Whether each token of the vocabulary is known.
    knows: Bool[Array, "vocab"]

    @classmethod
    def create(cls, ids: Int[Array, "known"], vocab_size: int) -> "NarrowHead":
        """Makes the layer of these tokens.

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
        """Returns the logits of all tokens, from the decoder's normed states."""
        dense = Dense(self.ids.shape[0], ("embed", "vocab"), parent=None)
        known = dense.apply({"params": {"kernel": kernel}}, states)
        # On a CPU a scatter is three times as fast as a gather.
        unknown = jnp.full((*states.shape[:2], self.knows.shape[0]), -jnp.inf)
        where = {"unique_indices": True, "indices_are_sorted": True, "mode": "promise_in_bounds"}
        return unknown.at[..., self.ids].set(known, **where)


@flax.struct.dataclass
class NarrowT5(T5Model):
    """A ``T5Model`` with a narrow output layer; its parameters need not have a whole one."""

    head: NarrowHead = flax.struct.field(kw_only=True)
    kernel: weights.Form | Float[Array, "embed known"] = flax.struct.field(kw_only=True)

    @classmethod
    def narrowed(cls, model: T5Model, head: NarrowHead, kernel) -> "NarrowT5":
        """Replaces a model's output layer."""
        kernel = model.operations.packed("kernel", jnp.asarray(kernel))
        return cls(model.weights, model.module, model.operations, head=head, kernel=kernel)

    def rounded(self, bits: int = 8) -> "NarrowT5":
        """Rounds the matrices, the narrow layer's too."""
        kernel = weights.rounded({"kernel": self.kernel}, bits, tied=False)["kernel"]
        return super().rounded(bits).replace(kernel=kernel)

    def logits(self, states: Float[Array, "batch new embed"]) -> Float32[Array, "batch new vocab"]:
        """Returns the narrow layer's logits."""
        return self.head.logits(self.kernel, states)


def check_number(number: int, vocab_size: int) -> None:
    """Raises ``InputError`` for a number of known tokens not from 1 to below ``vocab_size``."""
    if not 1 <= number < vocab_size:
        raise InputError(
            f"a narrow head of {number} of {vocab_size} tokens: give 1 to {vocab_size - 1}"
        )


def likeliest_ids(tokens: Int[Array, "tokens"], number: int, vocab_size: int) -> np.ndarray:
    """Returns the ``number`` most frequent of ``tokens``, increasing, with end of sequence.

    Raises:
        InputError: ``number`` is not from 1 to below ``vocab_size``.
    """
    check_number(number, vocab_size)
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size)
    counts[PAD_ID], counts[EOS_ID] = -1, counts.max() + 1
    # Vocabularies are sorted by frequency: lower ids win ties.
    return np.sort(np.argsort(-counts, kind="stable")[:number]).astype(np.int32)


def narrowed_params(own: PyTree, params: PyTree, config: T5Config, ids) -> PyTree:
    """Replaces the output layer in a draft's own parameters by its columns of known tokens.

    Returns ``own`` (``kept_layers.own_params``) with a ``narrow_head``, whose ``kernel`` is
    ``[embed, known]``, for the output layer. ``params`` are all of the draft's.
    """
    kernel = output_kernel(params, config)[:, ids]
    decoder = {name: each for name, each in own["decoder"].items() if name != "logits_dense"}
    return {**own, "decoder": decoder, "narrow_head": {"kernel": kernel}}


def output_kernel(params: PyTree, config: T5Config) -> Float[Array, "embed vocab"]:
    """Returns the output layer of a T5, which may be its embedding, with its scale."""
    if config.logits_via_embedding:
        return params["token_embedder"]["embedding"].T * config.output_scale
    return params["decoder"]["logits_dense"]["kernel"]
