"""Token losses, summed over the tokens of a batch, of a log line, of a held-out set.

The vocabulary axis is by far the largest array of a small model's step, so the cross-entropy has
a hand-written derivative, which stores nothing of the logits' size but itself.
"""

import dataclasses
import functools
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

    On the device or, once fetched, numpy's: hence no array type here.
    """

    loss: Any  # what is minimized, regularizers included
    cross_entropy: Any  # nats, without smoothing and z-loss
    num_correct: Any  # tokens whose largest logit is the target's
    num_tokens: Any
    # Of a training step, the global norm of its gradient before clipping.
    gradient_norm: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevMetrics:
    """Means over the target tokens of a held-out set."""

    cross_entropy: float  # nats per token, EOS included
    accuracy: float  # share of tokens predicted given the right ones before
    num_tokens: int

    name = "dev loss"

    @classmethod
    def of(cls, sums: Sequence) -> "DevMetrics":
        """Of cross-entropy, correct tokens and tokens of each batch.

        Raises:
            InputError: the batches hold no token.
        """
        cross_entropy, num_correct, num_tokens = np.reshape(sums, (-1, 3)).sum(
            axis=0, dtype=np.float64
        )
        if not num_tokens:
            raise InputError("0 tokens to evaluate on: give a dev file with text")
        return cls(
            cross_entropy=float(cross_entropy / num_tokens),
            accuracy=float(num_correct / num_tokens),
            num_tokens=int(num_tokens),
        )

    @property
    def value(self) -> float:
        """The cross-entropy."""
        return self.cross_entropy

    @property
    def perplexity(self) -> float:
        """``exp(cross_entropy)``: 2.0 nats are 7.39."""
        return float(np.exp(self.cross_entropy))

    def __str__(self) -> str:
        return f"dev loss {self.cross_entropy:.4f}  dev acc {self.accuracy:.3f}"

    def curves(self) -> dict[str, float]:
        """Loss and accuracy."""
        return {"dev_loss": self.cross_entropy, "dev_accuracy": self.accuracy}

    record = curves


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(
    logits: Float32[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float32[Array, "batch length"], Float32[Array, "batch length"]]:
    """Cross-entropy of every token, in nats.

    Args:
        logits: unnormalized scores.
        targets: the right tokens.
        label_smoothing: share of the target distribution spread evenly over the
            whole vocabulary, the right token included.
        z_loss: weight of ``logsumexp(logits) ** 2``, which keeps the logits from
            drifting (T5X uses 1e-4).

    Returns:
        The smoothed cross-entropy with the z-loss added, and the plain
        cross-entropy. Only the first has a gradient.
    """
    return _cross_entropy_forward(logits, targets, label_smoothing, z_loss)[0]


def _cross_entropy_forward(logits, targets, label_smoothing, z_loss):
    log_z = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    plain = log_z - right
    loss = plain + z_loss * jnp.square(log_z)
    if label_smoothing:
        loss += label_smoothing * (right - jnp.mean(logits, axis=-1))
    return (loss, plain), (logits, targets, log_z)


def _cross_entropy_backward(label_smoothing, z_loss, residuals, cotangents):
    logits, targets, log_z = residuals
    scale = cotangents[0][..., None]
    probs = jnp.exp(logits - log_z[..., None])
    # A comparison, not a scatter: it fuses with the rest into a single pass.
    tokens = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    is_right = tokens == targets[..., None]
    smooth = label_smoothing / logits.shape[-1]
    gradient = probs * (1.0 + 2.0 * z_loss * log_z[..., None])
    gradient -= jnp.where(is_right, 1.0 - label_smoothing + smooth, smooth)
    return gradient * scale, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


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
    """Loss summed over the tokens of a batch; padding does not count.

    With a target's logits the loss of a token is ``(1 - w) * cross_entropy + w * divergence``,
    w being ``distillation_weight`` and the divergence ``DIVERGENCES[objective]``. The objective
    "cross_entropy" does not use them.
    """
    counts = targets != PAD_ID
    loss, plain = cross_entropy(logits, targets, label_smoothing, z_loss)
    if target_logits is not None and objective != CROSS_ENTROPY:
        divergence = DIVERGENCES[objective](target_logits, logits)
        if distillation_weight == 1.0:
            # Not 0 times the other, whose gradient would take a pass of its own.
            loss = divergence
        else:
            loss = (1.0 - distillation_weight) * loss + distillation_weight * divergence
    # Ties count as correct; argmax would cost another pass with indices.
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    correct = right >= jnp.max(logits, axis=-1)

    def total(values: Array) -> Array:
        # Chosen, not multiplied: a model may give padding no chance at all.
        return jnp.sum(jnp.where(counts, values, 0.0))

    return LossSums(
        loss=total(loss),
        cross_entropy=total(plain),
        num_correct=total(correct.astype(jnp.float32)),
        num_tokens=jnp.sum(counts, dtype=jnp.float32),
    )
