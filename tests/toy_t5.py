"""Tiny T5s of random parameters."""

from collections.abc import Callable

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from spec_t5x.models.binding import bind, expected_shapes
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import NetworkConfig, T5Config
from spec_t5x.types import PyTree


def tiny_t5(seed: int, **changes) -> T5Model:
    """Makes a T5 1.1 of about 6,000 random parameters that writes varied texts.

    Seed 0, at temperature 0, ends some of its texts within 16 tokens. ``changes`` are other
    values of ``T5Config``'s fields.
    """
    sizes = {
        "vocab_size": 30,
        "emb_dim": 16,
        "num_heads": 2,
        "head_dim": 8,
        "mlp_dim": 24,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "mlp_activations": ("gelu", "linear"),
        "logits_via_embedding": False,
        # Few buckets, close together, so that short texts reach all of them.
        "relpos_num_buckets": 8,
        "relpos_max_distance": 12,
    }
    config = T5Config(**{**sizes, **changes})

    def scaled(path, noise):
        if noise.ndim == 1:
            return 1 + 0.2 * noise
        if "rel_embedding" in path:
            return 2 * noise
        if "embedding" in path or "logits_dense" in path:
            return noise
        return 1.5 * noise / np.sqrt(len(noise))

    return T5Model.create(random_params(config, seed, scaled), config)


def disturbed(model: CachedModel, amount: float, seed: int = 0) -> CachedModel:
    """Returns the model with noise on its parameters, which often predicts the same tokens.

    ``amount`` is the noise's standard deviation, as a share of each parameter's value.
    """
    rng = np.random.default_rng(seed)

    def disturb(leaf):
        return leaf * (1 + amount * rng.normal(size=leaf.shape)).astype(np.float32)

    return bind(jax.tree.map(disturb, model.params), model.config)


def random_params(
    config: NetworkConfig, seed: int, scaled: Callable[[str, np.ndarray], np.ndarray]
) -> PyTree:
    """Draws parameters: ``scaled(path, draws)`` makes each array from standard normal draws."""
    rng = np.random.default_rng(seed)
    shapes = sorted(expected_shapes(config).items())
    flat = {path: scaled(path, rng.normal(size=shape)) for path, shape in shapes}
    return unflatten_dict({path: x.astype(np.float32) for path, x in flat.items()}, sep="/")
