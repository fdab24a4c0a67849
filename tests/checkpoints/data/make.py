"""Saves checkpoints with T5X: those committed in this folder, and those of tests.

    PYTHONPATH=. python tests/checkpoints/data/make.py

rewrites the two directories in this folder (T5X at commit cc342d4), and removes from them the
machine and the time that Orbax records.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

HERE = Path(__file__).parent
STEP = 7

# The vocabulary is bytes, so that no file is needed.
_TINY = {
    "vocab_size": 272,
    "emb_dim": 4,
    "num_heads": 2,
    "head_dim": 2,
    "mlp_dim": 8,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
}
LEGACY = T5Config(**_TINY)
ORBAX = T5Config(**_TINY, mlp_activations=("gelu", "linear"), logits_via_embedding=False)


def known_params(config: T5Config) -> PyTree:
    """Returns weights that are equal on every machine and differ between tensors."""
    flat = {}
    for number, (path, shape) in enumerate(sorted(expected_shapes(config).items()), start=1):
        values = (np.arange(np.prod(shape), dtype=np.int64) * 7919 + 104729 * number) % 2048
        flat[path] = (values.astype(np.float32) / 1024 - 1).reshape(shape)
    return unflatten_dict(flat, sep="/")


def save_legacy(
    model_dir: Path, params: PyTree, config: T5Config, step: int = STEP, dtype=np.float32
) -> Path:
    """Saves ``model_dir/checkpoint_STEP`` of the legacy format, with an optimizer's state."""
    from t5x import checkpoints

    state = _train_state(t5x_network(config), as_t5x(params, config), step)
    checkpoints.Checkpointer(state, _partitioner(), str(model_dir), save_dtype=dtype).save(state)
    return model_dir / f"checkpoint_{step}"


def save_orbax(
    model_dir: Path, params: PyTree, config: T5Config, step: int = STEP, dtype=np.float32
) -> Path:
    """Saves ``model_dir/checkpoint_STEP`` with T5X's Orbax interface, without an optimizer."""
    from t5x import checkpoints, train_state

    state = _train_state(t5x_network(config), as_t5x(params, config), step)
    variables = {"params": state.params, "params_axes": state.params_axes}
    state = train_state.InferenceState.create(variables).replace_step(jnp.int32(step))
    model_dir.mkdir(parents=True)
    manager = checkpoints.OrbaxCheckpointManagerInterface(
        str(model_dir), state, _partitioner(), save_dtype=dtype
    )
    manager.save(state)
    manager.wait_until_finished()
    manager.close()
    return model_dir / f"checkpoint_{step}"


def restore(checkpoint: Path, config: T5Config):
    """Returns the checkpoint as T5X restores it for inference."""
    from t5x import checkpoints, train_state

    state = _train_state(t5x_network(config), as_t5x(known_params(config), config), 0)
    state = train_state.InferenceState.create(
        {"params": state.params, "params_axes": state.params_axes}
    )
    checkpointer = checkpoints.Checkpointer(state, _partitioner(), str(checkpoint.parent))
    return checkpointer.restore(path=str(checkpoint))


def t5x_network(config: T5Config):
    """Returns T5X's network of that configuration; ``scalable_t5`` has biases in every layer."""
    names = (*_TINY, "mlp_activations", "logits_via_embedding", "dtype")
    sizes = {n: getattr(config, n) for n in names}
    if config.relpos_per_layer:
        from t5x.examples.scalable_t5 import network
    else:
        from t5x.examples.t5 import network
    return network.Transformer(network.T5Config(**sizes))


def as_t5x(params: PyTree, config: T5Config) -> PyTree:
    """Returns our parameters in the tree of ``t5x_network``, whose layers may be scanned."""
    if not config.relpos_per_layer:
        return params
    flat = flatten_dict(params, sep="/")
    scanned = {path: leaf for path, leaf in flat.items() if "/layers_" not in path}
    for stack in ("encoder", "decoder"):
        for path in [path for path in flat if path.startswith(f"{stack}/layers_0/")]:
            num = getattr(config, f"num_{stack}_layers")
            layers = [flat[path.replace("layers_0", f"layers_{n}")] for n in range(num)]
            heads = (config.num_heads, config.head_dim)
            if path.endswith(("query/kernel", "key/kernel", "value/kernel")):
                layers = [layer.reshape(-1, *heads) for layer in layers]
            elif path.endswith("out/kernel"):
                layers = [layer.reshape(*heads, -1) for layer in layers]
            scanned[path.replace("layers_0", stack)] = np.stack(layers, axis=1)
    return unflatten_dict(scanned, sep="/")


def _train_state(module, params: PyTree, step: int):
    """Returns T5X's training state of a network with these parameters, at ``step``."""
    import jax
    from t5x import adafactor, train_state

    tokens = jnp.ones((1, 1), jnp.int32)

    def init():
        return module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)

    # T5X's code relies on rank promotion.
    with jax.numpy_rank_promotion("allow"):
        variables = jax.eval_shape(init)
    variables = {**variables, "params": jax.tree.map(jnp.asarray, params)}
    optimizer = adafactor.Adafactor(
        decay_rate=0.8,
        step_offset=0,
        logical_factor_rules=adafactor.standard_logical_factor_rules(),
    )
    state = train_state.FlaxOptimTrainState.create(optimizer, variables)
    return state.replace_step(jnp.int32(step))


def _partitioner():
    from t5x import partitioning

    return partitioning.PjitPartitioner(num_partitions=1)


def _main() -> None:
    for name, save, config in (
        ("t5x_legacy", save_legacy, LEGACY),
        ("t5x_orbax", save_orbax, ORBAX),
    ):
        shutil.rmtree(HERE / name, ignore_errors=True)
        _forget_machine(save(HERE / name, known_params(config), config))


def _forget_machine(directory: Path) -> None:
    # The state of data and optimizer is not needed.
    for path in [directory / "dataset", *directory.glob("state.param_states.*")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.rglob("commit_success.txt"):
        path.write_text("Checkpoint commit was successful\n")
    path = directory / "_CHECKPOINT_METADATA"
    if path.is_file():
        metadata = json.loads(path.read_text())
        metadata.update(init_timestamp_nsecs=None, commit_timestamp_nsecs=None)
        path.write_text(json.dumps(metadata))


if __name__ == "__main__":
    _main()
