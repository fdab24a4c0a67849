"""Functions of arrays, without a model: logits to tokens, rules of decoding, verification."""
