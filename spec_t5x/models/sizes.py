"""The published sizes of T5, by name.

T5 1.0 (Raffel et al. 2020), 1.1 (whose sizes Flan-T5 has too), mT5 (Xue et al. 2021), umT5
(Chung et al. 2023), ByT5 (Xue et al. 2022) and MADLAD-400's translation models (Kudugunta et al.
2023). The paper's 11B target is ``t5_1_1_xxl``, its drafts are ``t5_1_1_small``, ``_base`` and
``_large``.
"""

import dataclasses

from spec_t5x import registry
from spec_t5x.errors import InputError
from spec_t5x.models.binding import Family, ModelConfig
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config

_GATED = {"mlp_activations": ("gelu", "linear"), "logits_via_embedding": False}
# Bytes and special ids, padded; the encoder is deeper than the decoder.
_BYT5 = {**_GATED, "vocab_size": 384}


def _config(emb_dim, num_heads, head_dim, mlp_dim, encoder, decoder, **more) -> T5Config:
    return T5Config(
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_encoder_layers=encoder,
        num_decoder_layers=decoder,
        **more,
    )


_T5_1_0 = {
    "small": _config(512, 8, 64, 2048, 6, 6),
    "base": _config(768, 12, 64, 3072, 12, 12),
    "large": _config(1024, 16, 64, 4096, 24, 24),
    # Published as 3B and 11B.
    "xl": _config(1024, 32, 128, 16384, 24, 24),
    "xxl": _config(1024, 128, 128, 65536, 24, 24),
}
_T5_1_1 = {
    "small": _config(512, 6, 64, 1024, 8, 8, **_GATED),
    "base": _config(768, 12, 64, 2048, 12, 12, **_GATED),
    "large": _config(1024, 16, 64, 2816, 24, 24, **_GATED),
    "xl": _config(2048, 32, 64, 5120, 24, 24, **_GATED),
    "xxl": _config(4096, 64, 64, 10240, 24, 24, **_GATED),
}
_BYT5_SIZES = {
    "small": _config(1472, 6, 64, 3584, 12, 4, **_BYT5),
    "base": _config(1536, 12, 64, 3968, 18, 6, **_BYT5),
    "large": _config(1536, 16, 64, 3840, 36, 12, **_BYT5),
    "xl": _config(2560, 32, 64, 6720, 36, 12, **_BYT5),
    "xxl": _config(4672, 64, 64, 12352, 36, 12, **_BYT5),
}

# By what the paper says of layers and parameters; how many heads the 10B's width has is a guess.
_MADLAD = {
    "3b": _config(1024, 16, 128, 8192, 32, 32, **_GATED, vocab_size=256000),
    "10b": _config(2048, 16, 256, 16384, 32, 32, **_GATED, vocab_size=256000),
}


SIZES: dict[str, T5Config] = {
    **{f"t5_1_0_{name}": config for name, config in _T5_1_0.items()},
    **{f"t5_1_1_{name}": config for name, config in _T5_1_1.items()},
    **{
        f"mt5_{name}": dataclasses.replace(config, vocab_size=250112)
        for name, config in _T5_1_1.items()
    },
    **{
        f"umt5_{name}": dataclasses.replace(config, vocab_size=256384, relpos_per_layer=True)
        for name, config in _T5_1_1.items()
        # Not published.
        if name != "large"
    },
    **{f"byt5_{name}": config for name, config in _BYT5_SIZES.items()},
    **{f"madlad400_{name}": config for name, config in _MADLAD.items()},
}


T5 = Family(config=T5Config, model=T5Model, sizes=SIZES)


def size(name: str) -> ModelConfig:
    """The published sizes of that name, of any family: float32, dropout as trained with.

    Raises:
      InputError: no such name.
    """
    known = {}
    for family in registry.find_all("family").values():
        known |= family.sizes
    if name not in known:
        raise InputError(f"no T5 size is called {name!r}: the known ones are {', '.join(known)}")
    return known[name]
