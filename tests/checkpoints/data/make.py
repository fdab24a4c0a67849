"""Saves checkpoints with T5X itself: those committed here, and those of the tests.

    PYTHONPATH=. python tests/checkpoints/data/make.py

writes the two directories beside this file anew (T5X at commit cc342d4), and takes out of
them what Orbax notes about the machine and the time.
"""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

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
    """Weights that every machine computes alike: no two tensors are the same."""
    flat = {}
    for number, (path, shape) in enumerate(sorted(expected_shapes(config).items()), start=1):
        values = (np.arange(np.prod(shape), dtype=np.int64) * 7919 + 104729 * number) % 2048
        flat[path] = (values.astype(np.float32) / 1024 - 1).reshape(shape)
    return unflatten_dict(flat, sep="/")


def save_legacy(
    model_dir: Path, params: PyTree, config: T5Config, step: int = STEP, dtype=np.float32
) -> Path:
    """``model_dir/checkpoint_STEP`` of the legacy format, with an optimizer's state."""
    from t5x import checkpoints

    state = _train_state(t5x_network(config), params, step)
    checkpoints.Checkpointer(state, _partitioner(), str(model_dir), save_dtype=dtype).save(state)
    return model_dir / f"checkpoint_{step}"


def save_orbax(
    model_dir: Path, params: PyTree, config: T5Config, step: int = STEP, dtype=np.float32
) -> Path:
    """``model_dir/checkpoint_STEP`` as T5X's Orbax interface writes it, parameters alone."""
    from t5x import checkpoints, train_state

    state = _train_state(t5x_network(config), params, step)
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


def save_network(model_dir: Path, module) -> Path:
    """A network of T5X's, all zeros, of the legacy format."""
    from t5x import checkpoints

    state = _train_state(module, None, 0)
    checkpoints.Checkpointer(state, _partitioner(), str(model_dir)).save(state)
    return model_dir / "checkpoint_0"


def restore(checkpoint: Path, config: T5Config):
    """The checkpoint as T5X restores it for inference."""
    from t5x import checkpoints, train_state

    state = _train_state(t5x_network(config), known_params(config), 0)
    state = train_state.InferenceState.create(
        {"params": state.params, "params_axes": state.params_axes}
    )
    checkpointer = checkpoints.Checkpointer(state, _partitioner(), str(checkpoint.parent))
    return checkpointer.restore(path=str(checkpoint))


def t5x_network(config: T5Config):
    """T5X's own network of that configuration."""
    from t5x.examples.t5 import network

    names = (*_TINY, "mlp_activations", "logits_via_embedding", "dtype")
    return network.Transformer(network.T5Config(**{n: getattr(config, n) for n in names}))


def _train_state(module, params: PyTree | None, step: int):
    """T5X's state of a network with these parameters, or with zeros."""
    import jax
    from t5x import adafactor, train_state

    tokens = jnp.ones((1, 1), jnp.int32)

    def init():
        return module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)

    # T5X's own code promotes ranks as it likes.
    with jax.numpy_rank_promotion("allow"):
        variables = jax.eval_shape(init)
    if params is None:
        params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), variables["params"])
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
    # Neither a data set nor an optimizer goes on from here.
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
