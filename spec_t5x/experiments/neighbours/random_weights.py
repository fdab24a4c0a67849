"""Weights of any size drawn at random, written as a checkpoint that others can read.

For time alone. Scaled as T5 is initialized, so that activations stay finite and the text is not
chaotic. End of sequence and padding have no weights in the output layer: their logits are 0 where
the largest of the others is far above it, so that every implementation goes on to its last token
without being told to.
"""

import zlib
from pathlib import Path

import numpy as np

from spec_t5x.checkpoints.huggingface.reading import write_huggingface
from spec_t5x.checkpoints.storage.abstract import expected_shapes
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.weights import Index, TensorInfo, check_found
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.models.binding import ModelConfig
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID

_OUTPUT_LAYER = "decoder/logits_dense/kernel"
_TABLE = "token_embedder/embedding"


class RandomWeights:
    """``checkpoints.weights.Weights`` that are drawn when they are read, tensor by tensor."""

    def __init__(self, config: T5Config, seed: int):
        self.source = f"random weights of seed {seed}"
        self._config = config
        self._seed = seed

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """All there are, float32."""
        return {
            path: TensorInfo(shape=shape, dtype="float32", name=path)
            for path, shape in expected_shapes(self._config).items()
        }

    def check(self, config: ModelConfig) -> None:
        """Compares shapes, as all weights do."""
        check_found(self.tensors, expected_shapes(config), self.source)

    def read(self, path: str, index: Index) -> np.ndarray:
        """A part of a tensor, the same whenever it is read."""
        shape = expected_shapes(self._config)[path]
        if path.endswith("scale"):
            return np.ones(shape, np.float32)[index]
        # Its own stream: tensors are read in any order, by several threads.
        rng = np.random.default_rng([self._seed, zlib.crc32(path.encode())])
        tensor = self._bound(path, shape) * (2 * rng.random(shape, np.float32) - 1)
        silent = [PAD_ID, EOS_ID]
        if path == _OUTPUT_LAYER:
            tensor[:, silent] = 0
        elif path == _TABLE and self._config.logits_via_embedding:
            tensor[silent] = 0
        return tensor[index]

    def _bound(self, path: str, shape: tuple[int, ...]) -> np.float32:
        """Of a uniform distribution with the variance of T5's own initialization."""
        variance = 1.0 if path == _TABLE else 1 / shape[0]
        if path.endswith("query/kernel"):
            # T5 divides here and not the logits of its attention, which would else be large,
            # their softmax an argmax, and the text chaotic: another for every rounding.
            variance /= self._config.head_dim
        return np.float32((3 * variance) ** 0.5)


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
        weights=RandomWeights(config, seed),
        config=config,
        # A checkpoint needs one, and no text is read.
        vocabulary=ByteVocabulary(),
        directory=directory,
        metadata={},
    )
    write_huggingface(directory, stored, dtype="float32")
    return config
