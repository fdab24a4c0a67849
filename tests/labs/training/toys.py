"""Toy models, data and runs for tests in which the text does not matter."""

import contextlib
import dataclasses
import functools
import itertools
import types

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_t5x.cli.main import main
from spec_t5x.labs.training import trainer
from spec_t5x.labs.training.batching import Batches, join_pairs
from spec_t5x.labs.training.interfaces import Learner, TrainOptions
from spec_t5x.labs.training.losses import token_losses
from spec_t5x.labs.training.trainer import TrainResult, fit
from spec_t5x.models.t5 import T5Config


def toy_config(vocab_size: int = 16, emb_dim: int = 8, **changes) -> T5Config:
    """Returns a configuration, by default with one encoder and one decoder layer."""
    sizes = {"num_heads": 2, "head_dim": emb_dim // 2, "mlp_dim": 2 * emb_dim}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return T5Config(vocab_size=vocab_size, emb_dim=emb_dim, **sizes | changes)


def copy_batches(
    vocab_size: int = 16, *, rows: int = 4, seed: int = 0, kind: type[Batches] = Batches
) -> Batches:
    """Makes batches of 40 pairs whose target is the source, of 3 to 8 tokens with EOS."""
    rng = np.random.default_rng(0)
    texts = [[*rng.integers(2, vocab_size, n - 1).tolist(), 1] for n in rng.integers(3, 9, 40)]
    pairs = join_pairs(zip(texts, texts, strict=True))
    return kind(pairs, tokens_per_batch=8 * rows, seed=seed, buckets=(8,))


@dataclasses.dataclass(frozen=True)
class Copier(Learner):
    """Learner of a network that copies source tokens, with dropout; it compiles quickly."""

    options: TrainOptions
    width: int = 128

    target = None

    def init(self, key):
        shapes = {"embedding": (16, self.width), "scale": (self.width,), "kernel": (self.width, 16)}
        keys = jax.random.split(key, len(shapes))
        params = {
            name: 0.3 * jax.random.normal(each, shape)
            for each, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return {"decoder": params | {"bias": jnp.zeros(16)}}

    def shardings(self, mesh):
        raise NotImplementedError

    def loss(self, params, inputs, key, target_params=None):
        params = params["decoder"]
        states = params["embedding"][inputs[0]] * params["scale"][None, None]
        if key is not None:
            states *= jax.random.bernoulli(key, 0.9, states.shape)
        logits = states @ params["kernel"] + params["bias"][None, None]
        return token_losses(logits, inputs[2])


@functools.cache
def _optimizer(make, schedule):
    return make(schedule)


def train_toy(
    directory,
    steps: int,
    *,
    batches=None,
    dev: Batches | None = None,
    optimizer=optax.adam,
    schedule=lambda step: 1e-2,
    learner=Copier,
    export_dtype: str = "float32",
    **options,
) -> TrainResult:
    """Trains ``learner``; logging, evaluation, checkpoints are off unless ``options`` set them."""
    periods = {"log_period": 0, "eval_period": 0, "checkpoint_period": 0}
    return fit(
        learner(TrainOptions(steps=steps, **periods | options)),
        _optimizer(optimizer, schedule),
        schedule,
        batches or copy_batches(),
        dev,
        directory,
        export_dtype=export_dtype,
    )


@contextlib.contextmanager
def a_minute_a_step():
    """Replaces a run's clock by one that advances a minute at each reading."""
    minutes = types.SimpleNamespace(monotonic=functools.partial(next, itertools.count(0.0, 60.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "time", minutes)
        yield


def run_command(command: str, file: str, **bindings) -> int:
    """Runs ``spec-t5x COMMAND`` with ``gin_configs/runs/FILE.gin`` and returns its exit status.

    ``__`` in a binding's name is a dot; if two names are then equal, the second binding counts.
    """
    values = {name.replace("__", "."): value for name, value in bindings.items()}
    bound = [
        # A reference to a gin configurable is not quoted.
        f"--gin.{name}={value if str(value).startswith('@') else repr(value)}"
        for name, value in values.items()
    ]
    gin.clear_config()
    return main([command, f"--gin_file=gin_configs/runs/{file}.gin", *bound])


def assert_identical(left, right) -> None:
    """Checks that both trees have the same arrays."""
    jax.tree.map(np.testing.assert_array_equal, left, right)
