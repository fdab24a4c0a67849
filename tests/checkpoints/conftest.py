"""A tiny vocabulary and tiny models for the tests of checkpoints."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.labs.training.exports import save_model
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

_REPOSITORY = Path(__file__).parents[2]

TINY = {
    "vocab_size": 96,
    "emb_dim": 16,
    "num_heads": 2,
    "head_dim": 8,
    "mlp_dim": 24,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
}


@pytest.fixture(scope="session")
def configs() -> dict[str, T5Config]:
    """Provides tiny configurations of T5, by version."""
    return {
        "1.0": T5Config(**TINY),
        "1.1": T5Config(**TINY, mlp_activations=("gelu", "linear"), logits_via_embedding=False),
    }


@pytest.fixture(scope="session")
def random_params() -> Callable[..., PyTree]:
    """Provides ``random_params(config, seed=0)``, which returns NumPy weights of that model."""

    def make(config: T5Config, seed: int = 0) -> PyTree:
        rng = np.random.default_rng(seed)
        flat = {
            path: rng.normal(scale=0.3, size=shape).astype(np.float32)
            for path, shape in expected_shapes(config).items()
        }
        return unflatten_dict(flat, sep="/")

    return make


@pytest.fixture(scope="session")
def spiece(tmp_path_factory) -> Path:
    """Provides the path of a SentencePiece model of 40 pieces."""
    text = "the quick brown fox jumps over lazy dogs while seven wizards box"
    words = text.split(" ")
    lines = [" ".join(words[i:] + words[:i]) for i in range(len(words))] * 5
    prefix = tmp_path_factory.mktemp("vocabulary") / "tiny"
    return train_sentencepiece(lines, prefix, 40)


@pytest.fixture(scope="session")
def vocabulary(spiece) -> SentencePieceVocabulary:
    return SentencePieceVocabulary(spiece)


@pytest.fixture(scope="session")
def t5_spiece() -> Path:
    """Provides the path of T5's vocabulary, which is not part of the repository."""
    path = _REPOSITORY / "../shared/data/vocab/t5.spiece.model"
    if not path.is_file():
        pytest.skip("T5's vocabulary (../shared/data/vocab) is not on this machine")
    return path


@pytest.fixture
def saved(tmp_path, vocabulary, configs, random_params) -> Path:
    """Provides the directory of an undamaged checkpoint in the project's format."""
    config = configs["1.1"]
    save_model(tmp_path / "sound", random_params(config), config, vocabulary)
    return tmp_path / "sound"


@pytest.fixture(scope="session")
def t5x_data() -> SimpleNamespace:
    """Provides the directories of T5X's checkpoints, and the module ``data/make.py``."""
    directory = Path(__file__).parent / "data"
    made = SimpleNamespace(**runpy.run_path(str(directory / "make.py")))
    made.legacy = directory / "t5x_legacy" / f"checkpoint_{made.STEP}"
    made.orbax = directory / "t5x_orbax" / f"checkpoint_{made.STEP}"
    return made
