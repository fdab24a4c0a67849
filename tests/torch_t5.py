"""Tiny T5s of transformers', for comparisons."""

# But for ids and layers.
SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 3}


def enlivened(model):
    """The model for evaluation, with weights so large that its texts vary.

    Biases and norms have a say as well.
    """
    for name, parameter in model.named_parameters():
        weight = parameter.data
        if "relative_attention_bias" in name:
            weight.normal_()
        elif "lm_head" in name:
            weight.normal_(0.0, 0.3)
        elif "layer_norm" in name:
            weight.normal_(1.0, 0.2)
        elif "shared" not in name:
            weight.mul_(2.5)
    return model.eval()
