"""Token losses, summed over the tokens of a batch, of a log line or of a held-out set."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.labs.training.distillation_losses import CROSS_ENTROPY, DIVERGENCES
from spec_t5x.types import PAD_ID, Array, Float32, Int


@flax.struct.dataclass
class LossSums:
    """Sums over tokens, float32 scalars; divide by ``num_tokens`` for means.

    The fields have no array type, because they are JAX's or, once fetched, numpy's.
    """

    loss: Any  # the minimized quantity, regularizers included
    cross_entropy: Any  # nats, without smoothing and z-loss
    num_correct: Any  # tokens whose largest logit is the target's
    num_tokens: Any
    # The global norm of a training step's gradient before clipping; None in evaluation.
    gradient_norm: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevMetrics:
    """Means over the target tokens of a held-out set."""

    cross_entropy: float  # nats per token, EOS included
    accuracy: float  # share of tokens with the largest logit, teacher-forced
    num_tokens: int

    name = "dev loss"

    @classmethod
    def of(cls, sums: Sequence) -> "DevMetrics":
        """Computes the means from each batch's sums (cross-entropy, correct tokens, tokens).

        Raises:
            InputError: the batches hold no token.
        """
        total, num_correct, num_tokens = np.reshape(sums, (-1, 3)).sum(axis=0, dtype=np.float64)
        if not num_tokens:
            raise InputError("0 tokens to evaluate on: give a dev file with text")
        means = float(total / num_tokens), float(num_correct / num_tokens)
        return cls(cross_entropy=means[0], accuracy=means[1], num_tokens=int(num_tokens))

    @property
    def value(self) -> float:
        """The cross-entropy, which the run checks for being finite."""
        return self.cross_entropy

    @property
    def perplexity(self) -> float:
        """``exp(cross_entropy)``: 2.0 nats are 7.39."""
        return float(np.exp(self.cross_entropy))

    def __str__(self) -> str:
        return f"dev loss {self.cross_entropy:.4f}  dev acc {self.accuracy:.3f}"

    def curves(self) -> dict[str, float]:
        """Returns loss and accuracy by the names of their TensorBoard curves."""
        return {"dev_loss": self.cross_entropy, "dev_accuracy": self.accuracy}

    record = curves


def cross_entropy(
    logits: Float32[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float32[Array, "batch length"], Float32[Array, "batch length"]]:
    """Computes (loss with regularizers, plain cross-entropy) of every token, in nats.

    ``label_smoothing`` is the share of the one-hot distribution that is spread evenly over the
    vocabulary. ``z_loss`` is the weight of ``logsumexp(logits) ** 2``, which keeps the logits from
    drifting (T5X uses 1e-4).
    """

    # Recomputed for the derivative, so that no array of the logits' size is stored: the logits are
    # by far the largest array of a small model's step.
    @jax.checkpoint
    def both(logits):
        log_z = jax.nn.logsumexp(logits, axis=-1)
        # A mask, because the derivative of indexing is a scatter, which XLA does not fuse.
        is_right = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
        right = jnp.sum(logits, axis=-1, where=is_right)
        plain = log_z - right
        loss = plain + z_loss * jnp.square(log_z)
        if label_smoothing:
            loss += label_smoothing * (right - jnp.mean(logits, axis=-1))
        return loss, plain

    return both(logits)


def token_losses(
    logits: Float32[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    target_logits: Float32[Array, "batch length vocab"] | None = None,
    distillation_weight: float = 0.0,
    objective: str = "forward_kl",
) -> LossSums:
    """Sums the losses of a batch's tokens, padding excluded.

    If ``target_logits`` are given, the loss of a token is ``(1 - w) * cross_entropy + w *
    divergence`` with w = ``distillation_weight`` and the divergence ``DIVERGENCES[objective]``.
    The objective "cross_entropy" ignores both.
    """
    counts = targets != PAD_ID
    loss, plain = cross_entropy(logits, targets, label_smoothing, z_loss)
    if target_logits is not None and objective != CROSS_ENTROPY:
        divergence = DIVERGENCES[objective](target_logits, logits)
        if distillation_weight == 1.0:
            # Skips the cross-entropy, whose gradient would take another pass over the logits.
            loss = divergence
        else:
            loss = (1.0 - distillation_weight) * loss + distillation_weight * divergence
    # Counts ties as correct: argmax, which breaks ties, would cost another pass with indices.
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    correct = right >= jnp.max(logits, axis=-1)

    def total(values: Array) -> Array:
        # ``where``, because 0 times the loss of padding, which may be infinite, is NaN.
        return jnp.sum(jnp.where(counts, values, 0.0))

    return LossSums(
        loss=total(loss),
        cross_entropy=total(plain),
        num_correct=total(correct.astype(jnp.float32)),
        num_tokens=jnp.sum(counts, dtype=jnp.float32),
    )
