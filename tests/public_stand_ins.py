"""Tiny T5 1.0 networks of random weights, in the layout of the Hugging Face Hub."""

from pathlib import Path

import numpy as np
from flax.traverse_util import unflatten_dict

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.native.model_files import save_model
from spec_t5x.data.vocabulary import train_sentencepiece
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.t5 import T5Config
from tests.conftest import ENGLISH, GERMAN


def write(root: Path) -> Path:
    """Writes ``t5-base``, ``t5-small``, ``other`` (another vocabulary) and ``ende.tsv``.

    ``native`` has the models in the package's format. Returns ``root``.
    """
    ours = train_sentencepiece(ENGLISH + GERMAN, root / "vocabularies" / "ours", 120)
    other = train_sentencepiece(GERMAN, root / "vocabularies" / "other", 120)
    for name, seed, spiece, layers in (
        ("t5-base", 3, ours, 2),
        ("t5-small", 4, ours, 1),
        ("other", 5, other, 1),
    ):
        config = T5Config(
            vocab_size=128,
            emb_dim=16,
            num_heads=2,
            head_dim=8,
            mlp_dim=32,
            num_encoder_layers=layers,
            num_decoder_layers=layers,
        )
        rng = np.random.default_rng(seed)
        flat = {
            path: rng.normal(scale=0.3, size=shape).astype(np.float32)
            for path, shape in expected_shapes(config).items()
        }
        native = root / "native" / name
        save_model(native, unflatten_dict(flat, sep="/"), config, spiece, dtype="float32")
        convert(native, root / name, to="huggingface")
    lines = [f"{source}\t{target}\n" for source, target in zip(ENGLISH, GERMAN, strict=False)]
    (root / "ende.tsv").write_text("".join(lines[:4]), encoding="utf-8")
    return root
