"""Parameters that a draft shares with its target, and those that are its own.

A draft whose layers were made of its target's may *share* parameters with the target: embedding,
encoder, and the maps to keys and values of the source in each decoder layer. Shared parameters are
not trained, and the draft uses the target's keys and values of a source. Other parameters are its
*own*.
"""

from spec_t5x.types import PyTree

# Module of a decoder layer that attends to the source, and the maps in it that are shared.
CROSS = "encoder_decoder_attention"
SHARED_MAPS = ("key", "value")
_SHARED = ("token_embedder", "encoder")


def own_params(params: PyTree) -> PyTree:
    """Returns the parameters that a draft does not share with its target."""
    decoder = {name: _without_shared(module) for name, module in params["decoder"].items()}
    own = {name: module for name, module in params.items() if name not in _SHARED}
    return {**own, "decoder": decoder}


def _without_shared(module: PyTree) -> PyTree:
    if CROSS not in module:
        return module
    cross = {name: map_ for name, map_ in module[CROSS].items() if name not in SHARED_MAPS}
    return {**module, CROSS: cross}
