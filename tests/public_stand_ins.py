"""Tiny T5 1.0 networks of random weights, in the layout of the Hugging Face Hub."""

from pathlib import Path

from spec_t5x.checkpoints.convert import convert
from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.labs.training.exports import save_model
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece
from spec_t5x.models.t5 import T5Config
from tests.conftest import ENGLISH, GERMAN
from tests.toy_t5 import random_params


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
        params = random_params(config, seed, lambda path, draws: 0.3 * draws)
        native = root / "native" / name
        save_model(native, params, config, SentencePieceVocabulary(spiece), dtype="float32")
        convert(native, root / name, to="huggingface")
    lines = [f"{source}\t{target}\n" for source, target in zip(ENGLISH, GERMAN, strict=False)]
    (root / "ende.tsv").write_text("".join(lines[:4]), encoding="utf-8")
    return root
