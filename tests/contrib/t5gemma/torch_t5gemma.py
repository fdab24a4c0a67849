"""Tiny T5Gemmas of transformers, to compare with this package's."""

import torch
import transformers

# Window of local layers, smaller than the tests' texts.
WINDOW = 4
_STACK = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 7,
    "sliding_window": WINDOW,
    # Low enough to change scores and logits.
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 0.5,
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_SCALED = {"rope_theta": 1000.0, "rope_type": "linear", "factor": 8.0}


def make_t5gemma(kind: str, num_ids: int, layers: int, seed: int):
    """Makes a model of ``kind`` "t5gemma" or "t5gemma2" in evaluation mode, whose texts vary.

    T5Gemma's encoder is wider than its decoder. T5Gemma 2's layers differ in their positions, and
    its last id ends an image.
    """
    torch.manual_seed(seed)
    stack = _STACK | {"vocab_size": num_ids, "num_hidden_layers": layers}
    if kind == "t5gemma":
        encoder = stack | {"hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.T5GemmaConfig(encoder=encoder, decoder=stack, vocab_size=num_ids)
        model = transformers.T5GemmaForConditionalGeneration(config)
    else:
        ropes = {"sliding_attention": {"rope_type": "default"}, "full_attention": _SCALED}
        stack |= {"rope_parameters": ropes, "sliding_window_pattern": 2}
        encoder = {
            "text_config": dict(stack),
            "vision_config": _VISION,
            "mm_tokens_per_image": 1,
            "eoi_token_index": num_ids - 1,
        }
        config = transformers.T5Gemma2Config(encoder=encoder, decoder=dict(stack))
        model = transformers.T5Gemma2ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "post_feedforward" in name:
            # Outweighs the last token's embedding, which is the output layer.
            parameter.data.normal_(3.0, 0.3)
        elif "norm" in name:
            parameter.data.normal_(0.0, 0.3)
        elif "eoi_embedding" in name:
            parameter.data.normal_(0.0, 2.0)
        elif "embed_tokens" in name:
            parameter.data.normal_(0.0, 0.05)
        else:
            parameter.data.mul_(16.0)
    return model.eval()
