"""A narrow head: a draft's output layer that scores only the likely tokens.

The output layer takes most of the time of a small draft with a large vocabulary, and most tokens
that it scores never occur. A draft may leave tokens out, since the target generates these itself,
at the cost of a rejection (Zhao et al. 2025, FR-Spec, arXiv 2502.14856). Tokens that are left out
have a logit of probability 0, so that the logits still cover the whole vocabulary.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.models import weights
from spec_t5x.models.layers import Dense
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.types import Array, Bool, Float, Float32, Int

# Logit of a token that is left out. It is finite, so that there is a distribution even if rules of
# decoding exclude all known tokens.
UNKNOWN = -1e30


@flax.struct.dataclass
class NarrowHead:
    """Tokens that a narrow output layer scores, the *known* ones; its kernel is separate."""

    # Ids of the known tokens, increasing.
    ids: Int[Array, "known"]
    # Whether each token of the vocabulary is known.
    knows: Bool[Array, "vocab"]

    @classmethod
    def create(cls, ids: Int[Array, "known"], vocab_size: int) -> "NarrowHead":
        """Makes the head of the tokens ``ids``.

        Raises:
          InputError: no ids, or ids that are not increasing or outside of the vocabulary.
        """
        ids = np.asarray(ids, np.int32)
        if not ids.size or np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
            raise InputError(
                f"a narrow head has {ids.size} ids of a vocabulary of {vocab_size}: give one or "
                f"more, increasing, from 0 to {vocab_size - 1}"
            )
        knows = np.zeros(vocab_size, bool)
        knows[ids] = True
        return cls(ids=jnp.asarray(ids), knows=jnp.asarray(knows))

    def logits(
        self,
        kernel: weights.Form | Float[Array, "embed known"],
        states: Float[Array, "batch length embed"],
    ) -> Float32[Array, "batch length vocab"]:
        """Returns ``states @ kernel`` as logits of all tokens, ``UNKNOWN`` for unknown ones."""
        dense = Dense(self.ids.shape[0], ("embed", "vocab"), parent=None)
        known = dense.apply({"params": {"kernel": kernel}}, states)
        # A scatter of known logits: on a CPU it is three times as fast as a gather for all tokens.
        unknown = jnp.full((*states.shape[:2], self.knows.shape[0]), UNKNOWN)
        where = {"unique_indices": True, "indices_are_sorted": True, "mode": "promise_in_bounds"}
        return unknown.at[..., self.ids].set(known, **where)


@flax.struct.dataclass
class NarrowT5(T5Model):
    """``T5Model`` with a narrow head; its parameters need no whole output layer."""

    head: NarrowHead = flax.struct.field(kw_only=True)
    kernel: weights.Form | Float[Array, "embed known"] = flax.struct.field(kw_only=True)

    @classmethod
    def narrowed(cls, model: T5Model, head: NarrowHead, kernel) -> "NarrowT5":
        """Makes a copy of ``model`` with the narrow head of this ``kernel`` (embed by known)."""
        kernel = model.operations.packed("kernel", jnp.asarray(kernel))
        return cls(model.weights, model.module, model.operations, head=head, kernel=kernel)

    def rounded(self, bits: int = 8) -> "NarrowT5":
        """Returns the model with matrices, that of the narrow head included, in 8 or 4 bits."""
        kernel = weights.rounded({"kernel": self.kernel}, bits, tied=False)["kernel"]
        return super().rounded(bits).replace(kernel=kernel)

    def logits(self, states: Float[Array, "batch new embed"]) -> Float32[Array, "batch new vocab"]:
        """Returns the narrow head's logits for normed decoder states."""
        return self.apply(states, method=lambda _, states: self.head.logits(self.kernel, states))
