"""Weights of any size drawn at random, written as a checkpoint that others can read.

For time alone. Scaled as T5 is initialized, so that activations stay finite and the text is not
chaotic. End of sequence and padding have no weights in the output layer: their logits are 0 where
the largest of the others is far above it, so that every implementation goes on to its last token
without being told to.
"""

import functools
import zlib
from pathlib import Path

import numpy as np

from spec_t5x.checkpoints.huggingface.t5 import write_model as write_huggingface
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.weights import Index, Tensor, Weights
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID

_OUTPUT_LAYER = "decoder/logits_dense/kernel"
_TABLE = "token_embedder/embedding"


def random_weights(config: T5Config, seed: int) -> Weights:
    """Float32 weights that are drawn when they are read, tensor by tensor."""

    def tensor(path, shape):
        read = functools.partial(_draw, config, seed, path, shape)
        return Tensor(name=path, shape=shape, dtype="float32", read=read)

    tensors = {path: tensor(path, shape) for path, shape in expected_shapes(config).items()}
    return Weights(source=f"random weights of seed {seed}", tensors=tensors)


def _draw(
    config: T5Config, seed: int, path: str, shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """A part of a tensor, the same whenever it is read."""
    if path.endswith("scale"):
        return np.ones(shape, np.float32)[index]
    # Its own stream: tensors are read in any order, by several threads.
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    # A uniform distribution with the variance of T5's own initialization.
    variance = 1.0 if path == _TABLE else 1 / shape[0]
    if path.endswith("query/kernel"):
        # T5 divides here and not the logits of its attention, which would else be large,
        # their softmax an argmax, and the text chaotic: another for every rounding.
        variance /= config.head_dim
    tensor = np.float32((3 * variance) ** 0.5) * (2 * rng.random(shape, np.float32) - 1)
    silent = [PAD_ID, EOS_ID]
    if path == _OUTPUT_LAYER:
        tensor[:, silent] = 0
    elif path == _TABLE and config.logits_via_embedding:
        tensor[silent] = 0
    return tensor[index]


def write_random(directory: Path, name: str, seed: int) -> T5Config:
    """Writes a model of a published size in Hugging Face's format, float32.

    Args:
      directory: where; its parents are made.
      name: of ``models.sizes``.
      seed: other weights for another seed.

    Returns:
      Its configuration.

    Raises:
      InputError: no such size.
    """
    config = size(name)
    stored = StoredModel(
        weights=random_weights(config, seed),
        config=config,
        # A checkpoint needs one, and no text is read.
        vocabulary=ByteVocabulary(),
        directory=directory,
        metadata={},
    )
    write_huggingface(directory, stored, dtype="float32")
    return config
