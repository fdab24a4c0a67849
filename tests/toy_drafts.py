"""Drafts of no use, which several tests share."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.interfaces import Cache, Context, Draft, Proposal
from spec_t5x.labs.training.first_head import first_head, head_config
from spec_t5x.models.eagle import EagleConfig
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.types import Array, Int, PyTree


@flax.struct.dataclass
class ConstantDraft(Draft):
    """A draft that always proposes the same token, without distributions."""

    token: Int[Array, ""]
    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state: Cache, context: Context, gamma: int) -> tuple[Proposal, Cache]:
        """Proposes the token ``gamma`` times."""
        tokens = jnp.full((context.lengths.shape[0], gamma), self.token, jnp.int32)
        return Proposal(tokens), state


def tiny_head(
    target: T5Model,
    layers: Sequence[int],
    width: int | None = None,
    depths: Sequence[int] = (),
    **options: bool,
) -> tuple[PyTree, EagleConfig]:
    """Returns parameters and configuration of an EAGLE head with random maps of token and states.

    The arguments are those of ``head_config``, with the target in place of its configuration.
    """
    key = jax.random.key(4)
    config = head_config(target.config, layers, width, depths, **options)
    own = first_head(key, target.params, target.config, config, layers)
    for name in ("fusion", *(["reduction"] if depths else [])):
        shape = own[name]["kernel"].shape
        own[name] = {"kernel": jax.random.normal(key, shape) * config.emb_dim**-0.5}
    return own, config
