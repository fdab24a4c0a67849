"""Heads that predict several tokens ahead from one decoder state.

Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115) and Medusa (Cai et al. 2024,
arXiv 2401.10774) add heads to a trained model: head i, from 0, predicts token t + 1 + i from the
state that token t was predicted from. As in Hydra (Ankner et al. 2024, arXiv 2402.05109), the heads
also take the embedding of token t.
"""

import dataclasses

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.machine.operations import Operations
from spec_t5x.models.logical_axes import param_with_axes
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.types import Array, Float, Float32, Int, PyTree

_fan_in_of_each_head = nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", batch_axis=(0,)
)


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Sizes of the heads."""

    # Width of the target's states, and number of the target's logits.
    emb_dim: int
    vocab_size: int
    num_heads: int = 5
    # Width of each head's hidden layer.
    hidden_dim: int = 256

    def __post_init__(self):
        check_at_least(self, **dict.fromkeys(vars(self), 1))


class Heads(nn.Module):
    """Residual blocks, one per head: ``state + wo silu(wi [norm(state); norm(token)])``.

    Norms make the heads independent of the scale of a target's embedding. ``wo`` is initialized to
    zero, so that a new head repeats the target's prediction of token t.
    """

    config: HeadsConfig

    @nn.compact
    def __call__(
        self,
        states: Float[Array, "batch length embed"],
        embedded: Float[Array, "batch length embed"],
        num: int,
    ) -> Float32[Array, "batch length num embed"]:
        """Returns the states of the first ``num`` heads, which the target's output layer takes.

        ``states`` are the target's normed decoder states, and ``embedded`` its embeddings of the
        tokens predicted from them.
        """
        cfg = self.config
        shape = (cfg.num_heads, 2 * cfg.emb_dim, cfg.hidden_dim)
        axes = ("draft_heads", "embed", "mlp")
        wi = param_with_axes(self, "wi", _fan_in_of_each_head, shape, axes)
        shape, axes = (cfg.num_heads, cfg.hidden_dim, cfg.emb_dim), ("draft_heads", "mlp", "embed")
        wo = param_with_axes(self, "wo", nn.initializers.zeros, shape, axes)

        states, embedded = states.astype(jnp.float32), embedded.astype(jnp.float32)
        inputs = jnp.concatenate([_normed(states), _normed(embedded)], axis=-1)
        hidden = nn.silu(jnp.einsum("ble,neh->blnh", inputs, wi[:num]))
        return states[:, :, None] + jnp.einsum("blnh,nhe->blne", hidden, wo[:num])


@flax.struct.dataclass
class T5Heads:
    """Heads bound to their target, whose embedding and output layer they share."""

    params: PyTree
    # The target's embedding and output layer, at their paths in the target's parameters.
    shared: PyTree
    module: Heads = flax.struct.field(pytree_node=False)
    network: Transformer = flax.struct.field(pytree_node=False)
    # The target's operations, which ``shared`` is packed for.
    operations: Operations = flax.struct.field(pytree_node=False)

    @classmethod
    def create(cls, params: PyTree, target: T5Model) -> "T5Heads":
        """Binds parameters ``{"wi": [heads, 2 embed, hidden], "wo": [heads, hidden, embed]}``.

        Raises:
          InputError: the heads take states of another width than the target's.
        """
        num_heads, double_width, hidden_dim = params["wi"].shape
        width = target.config.emb_dim
        if double_width != 2 * width:
            raise InputError(
                f"the heads take states of {double_width // 2} and the target has states of "
                f"{width}: use heads that were trained for this target"
            )
        config = HeadsConfig(width, target.vocab_size, num_heads, hidden_dim)
        shared = {"token_embedder": target.weights["token_embedder"]}
        if not target.config.logits_via_embedding:
            shared["decoder"] = {"logits_dense": target.weights["decoder"]["logits_dense"]}
        return cls(
            params=jax.tree.map(jnp.asarray, params),
            shared=shared,
            module=Heads(config),
            network=target.module,
            operations=target.operations,
        )

    @property
    def num_heads(self) -> int:
        """Number of heads, which is the number of tokens that they predict ahead."""
        return self.module.config.num_heads

    def head_states(
        self,
        states: Float[Array, "batch length embed"],
        tokens: Int[Array, "batch length"],
        num: int,
    ) -> Float32[Array, "batch length num embed"]:
        """Returns the states of the first ``num`` heads, for ``output_logits``.

        ``tokens`` are those predicted from the target's normed decoder ``states``; head i, from 0,
        predicts the token i + 1 positions after each of them.
        """

        def of_heads(network, states, tokens):
            embedded = network.token_embedder(tokens)
            return self.module.apply({"params": self.params}, states, embedded, num)

        return self._apply(states, tokens, method=of_heads)

    def output_logits(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """Returns logits: the target's output layer applied to states of the target or a head."""
        return self._apply(states, method="logits")

    def head_logits(
        self, states: Float[Array, "batch embed"], tokens: Int[Array, "batch"], num: int
    ) -> Float32[Array, "batch num vocab"]:
        """Returns the logits of the first ``num`` heads at one position of each row.

        ``states`` and ``tokens`` are those of ``head_states`` at that position.
        """
        return self.output_logits(self.head_states(states[:, None], tokens[:, None], num)[:, 0])

    def _apply(self, *args, method):
        return self.operations.apply(self.network, self.shared, *args, method=method)


def _normed(values: Float32[Array, "*rows embed"]) -> Float32[Array, "*rows embed"]:
    """Scales rows to a mean square of 1; zeros stay zeros."""
    return values * lax.rsqrt(jnp.mean(lax.square(values), axis=-1, keepdims=True) + 1e-6)
