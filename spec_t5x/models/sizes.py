"""The published sizes of T5, by name.

T5 1.0 (Raffel et al. 2020), 1.1 (whose sizes Flan-T5 has too), mT5 (Xue et al. 2021), umT5
(Chung et al. 2023), ByT5 (Xue et al. 2022) and MADLAD-400's translation models (Kudugunta et al.
2023). The paper's 11B target is ``t5_1_1_xxl``, its drafts are ``t5_1_1_small``, ``_base`` and
``_large``.
"""

from spec_t5x import registry
from spec_t5x.errors import check_choice
from spec_t5x.models.binding import Family
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import NetworkConfig, T5Config

_COLUMNS = ("emb_dim", "num_heads", "head_dim", "mlp_dim")
_LAYERS = ("num_encoder_layers", "num_decoder_layers")
_GATED = {"mlp_activations": ("gelu", "linear"), "logits_via_embedding": False}


def _configs(sizes: dict[str, tuple[int, ...]], **common) -> dict[str, T5Config]:
    """Returns configurations by name; a size lists ``_COLUMNS``, then ``_LAYERS``."""
    return {
        name: T5Config(**dict(zip(_COLUMNS + _LAYERS, numbers, strict=True)), **common)
        for name, numbers in sizes.items()
    }


_T5_1_0 = {
    "small": (512, 8, 64, 2048, 6, 6),
    "base": (768, 12, 64, 3072, 12, 12),
    "large": (1024, 16, 64, 4096, 24, 24),
    # Published as 3B and 11B.
    "xl": (1024, 32, 128, 16384, 24, 24),
    "xxl": (1024, 128, 128, 65536, 24, 24),
}
_T5_1_1 = {
    "small": (512, 6, 64, 1024, 8, 8),
    "base": (768, 12, 64, 2048, 12, 12),
    "large": (1024, 16, 64, 2816, 24, 24),
    "xl": (2048, 32, 64, 5120, 24, 24),
    "xxl": (4096, 64, 64, 10240, 24, 24),
}
_BYT5 = {
    "small": (1472, 6, 64, 3584, 12, 4),
    "base": (1536, 12, 64, 3968, 18, 6),
    "large": (1536, 16, 64, 3840, 36, 12),
    "xl": (2560, 32, 64, 6720, 36, 12),
    "xxl": (4672, 64, 64, 12352, 36, 12),
}
# Derived from the paper's numbers of layers and parameters; the 10B's number of heads is a guess.
_MADLAD = {
    "3b": (1024, 16, 128, 8192, 32, 32),
    "10b": (2048, 16, 256, 16384, 32, 32),
}
# umT5 large was not published.
_UMT5 = {name: numbers for name, numbers in _T5_1_1.items() if name != "large"}

SIZES: dict[str, T5Config] = {
    f"{model}_{name}": config
    for model, configs in {
        "t5_1_0": _configs(_T5_1_0),
        "t5_1_1": _configs(_T5_1_1, **_GATED),
        "mt5": _configs(_T5_1_1, **_GATED, vocab_size=250112),
        "umt5": _configs(_UMT5, **_GATED, vocab_size=256384, relpos_per_layer=True),
        # Bytes and special ids, padded.
        "byt5": _configs(_BYT5, **_GATED, vocab_size=384),
        "madlad400": _configs(_MADLAD, **_GATED, vocab_size=256000),
    }.items()
    for name, config in configs.items()
}

T5 = Family(config=T5Config, model=T5Model, sizes=SIZES)


def known_sizes() -> dict[str, NetworkConfig]:
    """Returns the published configurations of all families, by name: float32, with dropout."""
    families = registry.find_all("family").values()
    return {name: config for family in families for name, config in family.sizes.items()}


def size(name: str) -> NetworkConfig:
    """Returns the published configuration of a name; raises ``InputError`` for an unknown name."""
    known = known_sizes()
    check_choice("size", name, known)
    return known[name]
