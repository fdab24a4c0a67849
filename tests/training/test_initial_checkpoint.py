"""Training that goes on from a checkpoint of another task."""

import dataclasses

import jax
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.errors import InputError
from spec_t5x.training.optimizers import OptimizerOptions
from spec_t5x.training.run_data import DataOptions
from spec_t5x.training.run_train import train
from spec_t5x.training.trainer import TrainOptions

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def run(tmp_path, config, initial, **data):
    (tmp_path / "train.tsv").write_text("My sister\tMeine Schwester\na bird\tein Vogel\n" * 4)
    return train(
        output_dir=str(tmp_path / "run"),
        model=config,
        data=DataOptions(
            directory=str(tmp_path), train_file="train.tsv", tokens_per_batch=64, **data
        ),
        # Too small a step to be seen.
        optimizer=OptimizerOptions(learning_rate=1e-9, warmup_steps=1),
        options=TrainOptions(steps=1, eval_period=0, checkpoint_period=0),
        initial_checkpoint=str(initial),
        export_dtype="float32",
    )


def test_parameters_and_vocabulary_are_taken_over(tiny_pair, tmp_path):
    initial = load(tiny_pair / "target", dtype="float32")
    run(tmp_path, dataclasses.replace(initial.config, dropout_rate=0.0), tiny_pair / "target")
    trained = load(tmp_path / "run" / "model")
    check_same_vocabulary(initial, trained)
    same = jax.tree.map(
        lambda a, b: np.allclose(a, b, atol=1e-6, rtol=0), initial.params, trained.params
    )
    assert all(jax.tree.leaves(same))


def test_another_size_or_kind_is_refused(tiny_pair, tmp_path):
    config = load(tiny_pair / "target").config
    larger = dataclasses.replace(config, mlp_dim=config.mlp_dim + 8)
    with pytest.raises(InputError, match=f"make T5Config.mlp_dim {config.mlp_dim}"):
        run(tmp_path, larger, tiny_pair / "target")
    with pytest.raises(InputError, match="lm-target is a GPTConfig, and the model to train a T5"):
        run(tmp_path, config, "lm-target")
