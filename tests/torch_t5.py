"""Tiny T5s of transformers, to compare with this package's."""

import functools

import jax
import numpy as np

from spec_t5x.models.t5 import Transformer

# Tolerance of logits in float32 between two implementations of one network, which may sum in
# another order.
TOLERANCE = 5e-4
# Sizes of all models; numbers of ids and layers are given separately.
SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 3}


def enlivened(model):
    """Changes a torch T5's weights in place so that texts vary; returns it in evaluation mode."""
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


def batch():
    """Returns ids: sources [3, 150] and targets [3, 140], two rows padded, distances above 128."""
    rng = np.random.default_rng(0)
    sources, targets = rng.integers(2, 160, (3, 150)), rng.integers(2, 160, (3, 140))
    for row in (1, 2):
        sources[row, 150 // (row + 1) :] = 0
        targets[row, 140 // (row + 1) :] = 0
    return sources.astype(np.int32), targets.astype(np.int32)


@functools.cache
def forward(config):
    """Returns the jitted forward pass without dropout, one object for equal configurations."""
    return jax.jit(functools.partial(Transformer(config).apply, enable_dropout=False))


def logits_of(model, sources, is_token, inputs, **more) -> np.ndarray:
    """Returns the logits of a torch model, teacher-forced, from arrays of ids."""
    import torch

    given = {"input_ids": sources, "attention_mask": is_token, "decoder_input_ids": inputs, **more}
    with torch.no_grad():
        return model(**{n: torch.tensor(x).long() for n, x in given.items()}).logits.numpy()


def assert_same_logits(loaded, model, tolerance=TOLERANCE):
    sources, targets = batch()
    inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    ours = forward(loaded.config)({"params": loaded.params}, sources, inputs, targets)
    theirs = logits_of(model, sources, sources != 0, inputs)
    real = targets > 0
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], rtol=0, atol=tolerance)
