"""Hugging Face's names of T5's parameters: the one table, for both directions.

Linear maps are stored there as ``[outputs, inputs]`` and relative biases as
``[buckets, heads]``: both are the transpose of T5X's.
"""

from spec_t5x.checkpoints.storage.abstract import expected_shapes
from spec_t5x.models.t5 import T5Config

SHARED = "shared.weight"
LM_HEAD = "lm_head.weight"

# Our modules within a layer, as theirs: encoder layers hold two blocks, decoder
# layers three.
_IN_ENCODER = {
    "pre_attention_layer_norm": "layer.0.layer_norm",
    "attention": "layer.0.SelfAttention",
    "pre_mlp_layer_norm": "layer.1.layer_norm",
    "mlp": "layer.1.DenseReluDense",
}
_IN_DECODER = {
    "pre_self_attention_layer_norm": "layer.0.layer_norm",
    "self_attention": "layer.0.SelfAttention",
    "pre_cross_attention_layer_norm": "layer.1.layer_norm",
    "encoder_decoder_attention": "layer.1.EncDecAttention",
    "pre_mlp_layer_norm": "layer.2.layer_norm",
    "mlp": "layer.2.DenseReluDense",
}
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}


def tensor_names(config: T5Config) -> dict[str, tuple[str, bool]]:
    """Their name of each of our parameters, and whether it is stored transposed.

    For example ``encoder/layers_0/attention/query/kernel`` is
    ``("encoder.block.0.layer.0.SelfAttention.q.weight", True)``.
    """
    return {path: _tensor_name(path) for path in expected_shapes(config)}


def _tensor_name(path: str) -> tuple[str, bool]:
    if path == "token_embedder/embedding":
        return SHARED, False
    if path == "decoder/logits_dense/kernel":
        return LM_HEAD, True
    stack, module, *inner = path.split("/")
    if module == "relpos_bias":
        bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return f"{stack}.{bias}", True
    if module == f"{stack}_norm":
        return f"{stack}.final_layer_norm.weight", False
    index = module.removeprefix("layers_")
    block = (_IN_ENCODER if stack == "encoder" else _IN_DECODER)[inner[0]]
    prefix = f"{stack}.block.{index}.{block}"
    if inner[-1] == "scale":
        return f"{prefix}.weight", False
    return f"{prefix}.{_PROJECTIONS.get(inner[1], inner[1])}.weight", True
