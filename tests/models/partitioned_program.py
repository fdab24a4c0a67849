"""Program that ``test_partitioning.py`` runs with 8 simulated devices.

It decodes on one device and on a mesh of data 2 x model 4, and prints both results as JSON.
"""

import json
import re

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.models import partitioning
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import NetworkConfig, T5Config
from spec_t5x.sampling.distributions import sampling

BATCH, LENGTH, GAMMA = 8, 12, 3
# Greedy and sampled rows in one batch.
SETTINGS = sampling(np.array([0.0, 1.0] * (BATCH // 2), np.float32))


def config(num_heads: int, num_decoder_layers: int) -> T5Config:
    return T5Config(
        vocab_size=64,
        emb_dim=16,
        num_heads=num_heads,
        head_dim=8,
        mlp_dim=32,
        num_encoder_layers=1,
        num_decoder_layers=num_decoder_layers,
        mlp_activations=("gelu", "linear"),
        logits_via_embedding=False,
    )


def random_params(config: NetworkConfig) -> dict:
    """Returns random weights with which rows differ and rounding changes no token."""
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in sorted(expected_shapes(config).items()):
        params[path] = rng.normal(scale=0.25, size=shape).astype(np.float32)
        if path.endswith("scale"):
            params[path] += 1.0 - config.norm.offset
    params["token_embedder/embedding"] *= 4
    return unflatten_dict(params, sep="/")


def decode(target: T5Model, draft: TransformerDraft | None, rows):
    """Decodes, plainly if ``draft`` is None; returns the compiled program and its tokens."""
    if draft is None:
        plain = autoregressive_decode.lower(target, *rows, max_decode_len=LENGTH).compile()
        return plain, texts(plain(target, *rows))
    options = {"gamma": GAMMA, "max_decode_len": LENGTH}
    program = speculative_decode.lower(target, draft, *rows, **options).compile()
    return program, texts(program(target, draft, *rows))


def texts(decoded) -> dict:
    found = {"tokens": np.asarray(decoded.tokens).tolist()}
    if decoded.stats is not None:
        found["accepted"] = int(decoded.stats.accepted.sum())
    return found


def shardings(found, wanted) -> dict[str, list]:
    """Returns [mesh axes in the program, mesh axes by the rules] of each parameter, by path."""
    found, wanted = flatten_dict(found, sep="/"), flatten_dict(wanted, sep="/")
    return {path: [_axes(found[path].spec), _axes(wanted[path].spec)] for path in wanted}


def _axes(spec: PartitionSpec) -> list:
    """Returns the axes of a spec without trailing None."""
    return list(spec)[: max((i + 1 for i, axis in enumerate(spec) if axis), default=0)]


def main(big: NetworkConfig, small: NetworkConfig, speculate: bool, kv: str = "auto") -> dict:
    params = random_params(big)
    # The draft is the target without its last layer.
    flat = flatten_dict(params, sep="/")
    draft_params = unflatten_dict(
        {path: leaf for path, leaf in flat.items() if "decoder/layers_1" not in path}, sep="/"
    )
    sources = np.random.default_rng(1).integers(2, 64, (BATCH, 12)).astype(np.int32)
    keys = jax.random.split(jax.random.key(2), BATCH)
    rows = (sources, np.zeros((BATCH, 1), np.int32), keys, SETTINGS)

    target = T5Model.create(params, big).with_kv(kv)
    draft = TransformerDraft(T5Model.create(draft_params, small)) if speculate else None
    alone = decode(target, draft, rows)[1]
    plain = decode(target, None, rows)[1] if speculate else alone

    mesh = partitioning.make_mesh(data=2, model=4)
    with partitioning.partitioned(mesh):
        params = jax.device_put(params, partitioning.param_shardings(big, mesh))
        target = T5Model.create(params, big).with_kv(kv)
        draft_params = jax.device_put(draft_params, partitioning.param_shardings(small, mesh))
        if speculate:
            draft = TransformerDraft(T5Model.create(draft_params, small))
        spread = jax.device_put(rows, partitioning.batch_sharding(mesh))
        program, on_mesh = decode(target, draft, spread)
        cache = jax.jit(lambda target, inputs: target.prefill(inputs, LENGTH))(target, spread[0])

    takes = program.input_shardings[0]
    return {
        "plain": plain,
        "alone": alone,
        "on_mesh": on_mesh,
        "target": shardings(takes[0].params, partitioning.param_shardings(big, mesh)),
        "draft": speculate
        and shardings(takes[1].model.params, partitioning.param_shardings(small, mesh)),
        "source": [_axes(a.sharding.spec) for a in jax.tree.leaves(cache.layers[0].cross_keys)],
        "rows": [_axes(sharding.spec) for sharding in takes[2:4]],
        "gathered": re.findall(r"= (\w+\[[\d,]+\])\S* all-gather\(", program.as_text()),
    }


if __name__ == "__main__":
    # Compilation would take most of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    # Numbers of heads that 4 divides, and that 4 does not divide.
    found = {
        "4": main(config(4, 2), config(4, 1), speculate=True),
        "6": main(config(6, 2), config(6, 1), speculate=False),
        "4 in int8": main(config(4, 2), config(4, 1), speculate=True, kv="int8"),
    }
    print(json.dumps(found))
