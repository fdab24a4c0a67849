"""T5X's own network of one of the package's configurations, for training and measuring."""

import dataclasses

from t5x.examples.t5 import network

from spec_t5x.errors import InputError
from spec_t5x.models.sizes import size as config_of_size
from spec_t5x.models.t5 import T5Config
from spec_t5x.t5x_plugin.networks import ENCODER_DECODER_FIELDS

# Fields of ``T5Config`` that are constants in T5X's network, with the values of the defaults.
_CONSTANTS = (
    "relpos_num_buckets",
    "relpos_max_distance",
    "relpos_per_layer",
    "layer_norm_epsilon",
)


def t5x_network(config: T5Config) -> network.Transformer:
    """Returns T5X's encoder-decoder (``t5x.examples.t5.network``) of this configuration.

    Raises:
      InputError: no configuration of a T5, or a value other than a constant of T5X's network.
    """
    if not isinstance(config, T5Config):
        kind = type(config).__name__.removesuffix("Config")
        raise InputError(f"T5X has no network of a {kind}: use spec-t5x, or give a size of T5")
    for name in _CONSTANTS:
        value, constant = getattr(config, name), getattr(T5Config, name)
        if value != constant:
            raise InputError(
                f"{name} is {value} and T5X's network has {constant}: use spec-t5x, whose "
                "networks have it as a setting"
            )
    sizes = {name: getattr(config, name) for name in ENCODER_DECODER_FIELDS}
    return network.Transformer(network.T5Config(**sizes, dtype=config.dtype))


def t5x_network_of_size(
    size: str, *, dropout_rate: float, dtype: str = "bfloat16"
) -> network.Transformer:
    """Returns ``t5x_network`` of a size, a name of ``models.sizes``; gin calls this function."""
    config = config_of_size(size)
    return t5x_network(dataclasses.replace(config, dropout_rate=dropout_rate, dtype=dtype))
