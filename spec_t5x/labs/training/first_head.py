"""An EAGLE head before training: its sizes and first parameters, made of its target's."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.errors import InputError
from spec_t5x.labs.training.kept_layers import keep_layers, output_kernel
from spec_t5x.models.eagle import EagleConfig, EagleNetwork
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import Array, Key, PyTree


def head_config(
    target: T5Config,
    layers: Sequence[int],
    width: int | None = None,
    depths: Sequence[int] = (),
    reads_source: bool = True,
) -> EagleConfig:
    """Returns the configuration of a head for a target.

    Args:
      target: the target's configuration.
      layers: the target's decoder layers whose keys and values of the source the head reads.
      width: width of the head's states; None for the target's.
      depths, reads_source: fields of ``EagleConfig``.

    Raises:
      InputError: a target that is no T5, or a width that is not from 1 to below the target's.
    """
    if not isinstance(target, T5Config):
        raise InputError(
            f"the target is a {type(target).__name__} and EAGLE heads need a T5: give another "
            "target, or a draft of its family"
        )
    target_dim, sizes = target.emb_dim, {}
    if width is not None:
        if not 1 <= width < target_dim:
            raise InputError(
                f"width is {width} and the target's {target_dim}: give less, or None for the "
                "target's width"
            )
        mlp_dim = max(1, target.mlp_dim * width // target_dim)
        sizes = {"emb_dim": width, "mlp_dim": mlp_dim, "logits_via_embedding": False}
    kept = target.with_layers(encoder=range(target.num_encoder_layers), decoder=layers)
    of_head = {"target_dim": target_dim, "depths": tuple(depths), "reads_source": reads_source}
    return EagleConfig(**vars(kept) | sizes | of_head)


def first_head(
    key: Key[Array, ""],
    params: PyTree,
    target: T5Config,
    config: EagleConfig,
    layers: Sequence[int],
) -> PyTree:
    """Returns initial values of a head's own parameters (``shared_params.own_params``).

    A head as wide as the target starts with layers of the target's decoder, and reads the tokens
    alone. A narrower head starts with random layers. Its state is the target's state, projected
    on the principal components of the target's output layer, to which the layers add.
    ``params`` and ``target`` are the target's; ``head_config`` makes ``config`` of ``layers``.
    """
    own = own_params(EagleNetwork(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"])
    target_dim, width = config.target_dim, config.emb_dim
    # Selects the last layer's states; states of other depths start with weight 0.
    last = jnp.eye(config.state_size, target_dim)
    if width == target_dim:
        encoder = range(target.num_encoder_layers)
        kept, _ = keep_layers(params, target, encoder=encoder, decoder=layers)
        theirs = flatten_dict(kept["decoder"])
        decoder = unflatten_dict({path: theirs[path] for path in flatten_dict(own["decoder"])})
        reduction, fusion = last, jnp.eye(2 * target_dim, target_dim)
    else:
        kernel = jnp.asarray(output_kernel(params, target), jnp.float32)
        # eigh sorts the largest to the end.
        components = jnp.linalg.eigh(kernel @ kernel.T)[1][:, -width:]
        # Scales the head's states to the size of the target's.
        scale = params["decoder"]["decoder_norm"]["scale"]
        size = jnp.sqrt(jnp.mean(jnp.square(scale)))
        decoder = {
            **own["decoder"],
            "decoder_norm": {"scale": jnp.full(width, size)},
            "logits_dense": {"kernel": components.T @ kernel},
        }
        reduction = last @ components
        fusion = own["fusion"]["kernel"].at[target_dim:].set(jnp.eye(width) / size)
    maps = {"reduction": {"kernel": reduction}, "fusion": {"kernel": fusion}}
    return {**maps, "decoder": decoder}
