"""Training of Medusa heads for a target, configured by a gin file.

    spec-t5x train-heads --gin_file=FILE.gin --gin.NAME=VALUE ...

Head i learns the target's distribution of the token i + 1 positions ahead, because the acceptance
rate is the overlap of the two distributions. One teacher-forced call of the target gives states and
distributions of a batch. The output directory has the layout of ``labs.training.run_train``, with
``heads/`` in place of ``model/``.
"""

import dataclasses
import functools
import operator

import gin
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spec_t5x.checkpoints.digests import files_digest
from spec_t5x.checkpoints.loading import load
from spec_t5x.contrib.medusa.checkpoints import save_heads
from spec_t5x.contrib.medusa.network import Heads, HeadsConfig, T5Heads
from spec_t5x.errors import InputError, check_choice, check_unused
from spec_t5x.labs.training.interfaces import Inputs, Learner, TrainOptions
from spec_t5x.labs.training.learners import read_target
from spec_t5x.labs.training.losses import LossSums, token_losses
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.run_data import TrainingData
from spec_t5x.labs.training.run_train import check_settings, figures_of, log_exported
from spec_t5x.labs.training.same_run import held_run
from spec_t5x.labs.training.trainer import TrainResult, fit
from spec_t5x.machine.operations import XLA
from spec_t5x.machine.paths import expanded
from spec_t5x.models.partitioning import declared_shardings
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.names import STORED_DTYPES
from spec_t5x.types import Array, Key, PyTree


@gin.configurable
def train_heads(
    *,
    output_dir: str,
    target: str,
    data: TrainingData,
    optimizer: OptimizerOptions,
    options: TrainOptions,
    num_heads: int = 5,
    hidden_dim: int = 256,
    export_dtype: str = "bfloat16",
    vocabulary: str | None = None,
) -> TrainResult:
    """Trains heads for a target, exports them to ``output_dir/heads`` and returns the result.

    Args:
        output_dir: directory of the run; made if absent, and resumed if it holds a run.
        target: directory or packaged name of the model that the heads are for.
        data: the pairs; must not set a vocabulary, as the target's is used.
        optimizer, options: see ``OptimizerOptions`` and ``TrainOptions``.
        num_heads: number of heads, each one token further ahead.
        hidden_dim: width of each head's hidden layer.
        export_dtype: type of the exported parameters, 'bfloat16' or 'float32'.
        vocabulary: SentencePiece model or "bytes", for T5X checkpoints, which store none.

    Raises:
        InputError: the target is not a T5, files or settings are invalid, or the run diverges.
    """
    data.check_for_draft()
    check_unused(options, "heads are trained without it", "label_smoothing")
    if options.z_loss not in (0.0, TrainOptions.z_loss):
        raise InputError(
            f"z_loss is {options.z_loss} and heads are trained without it: leave it out"
        )
    directory = expanded(output_dir)
    check_choice("stored dtype", export_dtype, STORED_DTYPES)
    check_settings(optimizer, options, export_dtype, directory / "heads")
    loaded = load(target, vocabulary=vocabulary)
    if not isinstance(loaded.config, T5Config):
        raise InputError(f"{loaded.directory} is a {type(loaded.config).__name__}: give a T5")
    config = HeadsConfig(loaded.config.emb_dim, loaded.config.vocab_size, num_heads, hidden_dim)
    with held_run(directory, {"target": files_digest(str(target), str(directory))["content"]}):
        result = fit(
            HeadsLearner(config, options, T5Model.create(loaded.params, loaded.config)),
            *optimizer.build(options.steps),
            *data.train_and_dev(loaded.vocabulary, options.seed),
            directory,
            export_dtype=export_dtype,
        )
        export = {"dtype": export_dtype, "extra": figures_of(result), "overwrite": True}
        save_heads(directory / "heads", result.state.params, loaded, **export)
    log_exported(result, f"heads in {directory / 'heads'}")
    return result


@dataclasses.dataclass(frozen=True)
class HeadsLearner(Learner):
    """Learner of a target's draft heads; losses and accuracies are means over heads."""

    config: HeadsConfig
    options: TrainOptions
    target: T5Model

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Returns parameters of new heads, which all repeat the target's prediction of token t."""
        return self._variables(key)["params"]

    def _variables(self, key: Key[Array, ""]) -> PyTree:
        state = jnp.zeros((1, 1, self.config.emb_dim))
        return Heads(self.config).init(key, state, state, self.config.num_heads)

    def shardings(self, mesh: Mesh) -> PyTree:
        """Returns each parameter's sharding over the mesh, by the heads' logical axes."""
        shapes = jax.eval_shape(self._variables, jax.random.key(0))
        return declared_shardings(shapes["params"], shapes["params_axes"], mesh)

    def loss(
        self, params: PyTree, inputs: Inputs, key: Key[Array, ""] | None, target_params: PyTree
    ) -> LossSums:
        """Returns ``heads_losses`` with the options' settings; ``key`` is unused (no dropout)."""
        # With JAX's precision of products, as in other trainings.
        target = self.target.replace(weights=target_params, operations=XLA)
        return heads_losses(
            T5Heads.create(params, target),
            target,
            inputs,
            distillation_weight=self.options.distillation_weight * self.options.uses_target,
            objective=self.options.objective,
        )


def heads_losses(
    heads: T5Heads,
    target: T5Model,
    inputs: Inputs,
    *,
    distillation_weight: float = 0.0,
    objective: str = "forward_kl",
) -> LossSums:
    """Sums ``losses.token_losses`` over heads, a token once for each head that predicts it."""
    text = inputs[2]
    target_logits, _, states = read_target(target, inputs)
    of_heads = heads.head_states(states, text, heads.num_heads)
    sums = []
    for i in range(heads.num_heads):
        # Head i predicts token t + 1 + i from the state and the embedding of token t.
        ahead = min(i + 1, text.shape[1])
        logits = heads.output_logits(of_heads[:, : text.shape[1] - ahead, i])
        theirs = target_logits[:, ahead:] if distillation_weight else None
        settings = {"distillation_weight": distillation_weight, "objective": objective}
        sums.append(token_losses(logits, text[:, ahead:], target_logits=theirs, **settings))
    return jax.tree.map(lambda *parts: functools.reduce(operator.add, parts), *sums)
