"""Distillation: a draft learns its target's distributions, and is evaluated by alpha.

The draft is trained on the target's outputs, on the references of the data, or on its own
outputs, which show it the positions that its own tokens lead to (on-policy; Agarwal et al. 2023,
GKD, arXiv 2306.13649, and DistillSpec, arXiv 2310.08461). At each position it minimizes one of
``distillation_losses.OBJECTIVES``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from spec_t5x.data.batching import Batch, Batches
from spec_t5x.errors import InputError
from spec_t5x.models import partitioning
from spec_t5x.models.binding import Model, ModelConfig
from spec_t5x.models.kept_layers import own_params, with_shared
from spec_t5x.models.logical_axes import partition_spec
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5, narrowed_params
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.sampling.distributions import overlap, sampling, standardize
from spec_t5x.training.held_out_alpha import HeldOutAlpha, HeldOutScores, held_out_alpha
from spec_t5x.training.learners import network_logits
from spec_t5x.training.losses import LossSums, token_losses
from spec_t5x.training.optimizers import Schedule
from spec_t5x.training.target_outputs import sample_outputs
from spec_t5x.training.trainer import (
    Inputs,
    Learner,
    Positioned,
    TrainOptions,
    TrainResult,
    fit,
    model_inputs,
)
from spec_t5x.types import PAD_ID, Array, Float32, Int, Key, PyTree

OUTPUTS = ("target", "references")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """What a draft is trained and measured on."""

    # "target": its outputs, sampled once; or the "references" of the data.
    outputs: str = "target"
    # Of the outputs that target and draft are sampled for training. 0 is argmax.
    temperature: float = 1.0
    # Share of the steps that use outputs of the draft itself, sampled in that step.
    on_policy: float = 0.0
    # Train on the first so many pairs; None takes all.
    train_texts: int | None = None
    # Evaluate on the first so many held-out sources, with the target's outputs at each of the
    # temperatures. alpha at the first temperature says which draft is the best.
    dev_texts: int = 500
    eval_temperatures: tuple = (0.0, 1.0)
    # For the expected tokens per iteration that are reported (Equation 1).
    gamma: int = 4
    # Evaluations without a better alpha after which the training stops; 0 never stops it.
    patience: int = 0

    def __post_init__(self):
        if self.outputs not in OUTPUTS:
            raise InputError(f"outputs is {self.outputs!r}: choose {' or '.join(OUTPUTS)}")
        if not isinstance(self.eval_temperatures, tuple | list) or not self.eval_temperatures:
            raise InputError(
                f"eval_temperatures is {self.eval_temperatures!r}: give a list, as in (0.0, 1.0)"
            )
        # gin's sequences.
        temperatures = tuple(float(each) for each in self.eval_temperatures)
        object.__setattr__(self, "eval_temperatures", temperatures)
        for temperature in (self.temperature, *temperatures):
            sampling(temperature)
        if not 0.0 <= self.on_policy <= 1.0:
            raise InputError(f"on_policy is {self.on_policy}: give 0..1")
        for name, least in (("dev_texts", 1), ("gamma", 1), ("patience", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}: give at least {least}")
        if self.train_texts is not None and self.train_texts < 1:
            raise InputError(f"train_texts is {self.train_texts}: give at least 1, or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Student:
    """The draft's network, and which of its parameters are trained."""

    config: ModelConfig
    # Trained: all, or ``models.kept_layers.own_params`` of a draft that shares the rest.
    params: PyTree
    # Of a draft that shares the target's frozen encoder and embedding: the layer of the
    # target's decoder that each of its decoder layers was.
    shared_layers: tuple[int, ...] | None = None
    # The tokens of a pruned output layer.
    head: NarrowHead | None = None

    def narrowed(self, target_params: PyTree, ids: np.ndarray) -> "Student":
        """The same with an output layer for these tokens, with its present weights."""
        whole = self.whole(self.params, target_params)
        params = narrowed_params(self.params, whole, self.config, ids)
        # The draft's own from now on, if it was the target's embedding.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        head = NarrowHead.create(ids, self.config.vocab_size)
        return dataclasses.replace(self, params=params, head=head)

    def param_shardings(self, mesh: Mesh) -> PyTree:
        """A ``NamedSharding`` for each of ``params``."""
        shardings = partitioning.param_shardings(self.config, mesh)
        if self.shared_layers is not None:
            shardings = own_params(shardings)
        if self.head is not None:
            shape = self.params["narrow_head"]["kernel"].shape
            spec = partition_spec(shape, ("embed", "vocab"), partitioning.RULES, mesh)
            decoder = {
                name: each for name, each in shardings["decoder"].items() if name != "logits_dense"
            }
            kernel = NamedSharding(mesh, spec)
            shardings = {"decoder": decoder, "narrow_head": {"kernel": kernel}}
        return shardings

    def whole(self, params: PyTree, target_params: PyTree) -> PyTree:
        """All parameters of the network."""
        if self.shared_layers is None:
            return params
        return with_shared(params, target_params, self.shared_layers)

    def model(self, params: PyTree, target_params: PyTree) -> T5Model:
        """The network, bound to all its parameters."""
        model = T5Model.create(self.whole(params, target_params), self.config)
        if self.head is None:
            return model
        return NarrowT5.narrowed(model, self.head, params["narrow_head"]["kernel"])

    def logits(
        self,
        params: PyTree,
        target_params: PyTree,
        inputs: Inputs,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float32[Array, "batch length vocab"]:
        """``network_logits`` of the draft."""
        if self.shared_layers is None and self.head is None:
            return network_logits(self.config, params, inputs, dropout_key)
        source, shifted, text = inputs
        learns = dropout_key is not None

        def read(network: Transformer):
            # What is shared is computed as in the target, also while the rest is trained.
            own_encoder = learns and self.shared_layers is None
            encoded = network.encode(source, enable_dropout=own_encoder)
            states = network.decode_states(encoded, source, shifted, text, enable_dropout=learns)
            if self.head is None:
                return network.logits(states)
            return self.head.logits(params["narrow_head"]["kernel"], states)

        return Transformer(self.config).apply(
            {"params": self.whole(params, target_params)},
            method=read,
            rngs={"dropout": dropout_key} if learns else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLearner(Learner):
    """A draft that learns its target's distributions, and is evaluated by alpha.

    The held-out data of a run are ``Batches`` by the temperature that the target wrote them at;
    alpha at the first temperature says which draft is the best.
    """

    student: Student
    target: Model
    distillation: DistillOptions
    options: TrainOptions

    keeps_best = True

    def init(self, key: Key[Array, ""]) -> PyTree:
        """The student's own."""
        return self.student.params

    def shardings(self, mesh: Mesh) -> PyTree:
        """See ``Student.param_shardings``."""
        return self.student.param_shardings(mesh)

    def loss(
        self,
        params: PyTree,
        inputs: Inputs,
        key: Key[Array, ""] | None,
        target_params: PyTree,
    ) -> LossSums:
        """Of the objective, with label smoothing and z-loss of the cross-entropy's share."""
        target_logits = None
        if self.options.uses_target:
            target_logits = network_logits(self.target.config, target_params, inputs)
        logits = self.student.logits(params, target_params, inputs, key)
        regularizers = {
            "label_smoothing": self.options.label_smoothing,
            "z_loss": self.options.z_loss,
        }
        return self.losses(logits, target_logits, inputs[2], **regularizers)

    def losses(
        self,
        logits: Float32[Array, "batch length vocab"],
        target_logits: Float32[Array, "batch length vocab"] | None,
        text: Int[Array, "batch length"],
        **regularizers: float,
    ) -> LossSums:
        """The objective, summed over the tokens that the draft has."""
        options, head = self.options, self.student.head
        if head is not None:
            if options.objective in ("forward_kl", "jeffreys") and target_logits is not None:
                # Infinite for tokens that the draft does not have: it learns the target's
                # distribution over the others.
                target_logits = jnp.where(head.knows[None, None], target_logits, -jnp.inf)
            if options.distillation_weight < 1 or not options.uses_target:
                # So is the cross-entropy: those tokens of the text are skipped.
                text = jnp.where(head.knows[text], text, PAD_ID)
        return token_losses(
            logits,
            text,
            target_logits=target_logits,
            distillation_weight=options.distillation_weight,
            objective=options.objective,
            **regularizers,
        )

    def inputs(self, params: PyTree, target_params: PyTree, step: int, batch: Batch) -> Inputs:
        """The batch; in a share of the steps, with texts that the draft samples itself.

        Which steps these are, and what is sampled, follows from seed, step and parameters, so
        that a resumed run reads the same texts.
        """
        seed = self.options.seed
        if np.random.default_rng([seed, step]).random() >= self.distillation.on_policy:
            return model_inputs(batch)
        source, _, text = model_inputs(batch)
        sampled = sample_outputs(
            self.student.model(params, target_params),
            source,
            jax.random.split(jax.random.fold_in(jax.random.key(seed + 2), step), len(source)),
            sampling(self.distillation.temperature),
            np.arange(len(source)) < batch.num_pairs,
            max_length=text.shape[1],
        )
        shifted = jnp.pad(sampled[:, :-1], ((0, 0), (1, 0)), constant_values=PAD_ID)
        return source, shifted, sampled

    def evaluate(
        self,
        params: PyTree,
        target_params: PyTree,
        dev: Mapping[float, Batches],
        place: Callable[[Inputs], Inputs],
    ) -> list[HeldOutAlpha]:
        """alpha at each temperature."""
        return [
            held_out_alpha(
                lambda inputs, temperature=temperature: self.score(
                    params, target_params, inputs, temperature
                ),
                list(batches.one_pass()),
                temperature=temperature,
                gamma=self.distillation.gamma,
            )
            for temperature, batches in dev.items()
        ]

    def score(
        self, params: PyTree, target_params: PyTree, inputs: Inputs, temperature: float
    ) -> HeldOutScores:
        """Objective and acceptance probabilities of a batch of the target's texts."""
        settings = sampling(temperature)
        return self._score(params, target_params, inputs, settings.temperature, settings.greedy)

    @functools.cached_property
    def _score(self):
        @functools.partial(jax.jit, static_argnames="greedy")
        def score(params, target_params, inputs, temperature, greedy):
            target_logits = network_logits(self.target.config, target_params, inputs)
            logits = self.student.logits(params, target_params, inputs)
            settings = dataclasses.replace(sampling(), temperature=temperature, greedy=greedy)
            betas = overlap(standardize(target_logits, settings), standardize(logits, settings))
            # Sums of probabilities, rounded.
            betas = jnp.where(inputs[2] != PAD_ID, jnp.minimum(betas, 1.0), 0.0)
            return HeldOutScores(sums=self.losses(logits, target_logits, inputs[2]), betas=betas)

        return score


def distill(
    learner: DraftLearner,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    train_batches: Batches | Positioned,
    held_out: Mapping[float, Batches],
    directory: str | Path,
) -> TrainResult:
    """``trainer.fit`` from the student's parameters, until alpha has not risen for long.

    Args:
        learner: the draft and its target.
        optimizer, schedule, train_batches, directory: as of ``trainer.fit``.
        held_out: texts that the target wrote, by temperature.
    """
    return fit(
        learner,
        optimizer,
        schedule,
        train_batches,
        held_out,
        directory,
        initial_params=learner.student.params,
        patience=learner.distillation.patience * learner.options.eval_period,
    )


def check_options(
    distillation: DistillOptions, options: TrainOptions, *, is_pruned: bool, is_lm: bool
) -> None:
    """Whether the settings go together.

    Args:
        distillation, options: of the run.
        is_pruned: whether the draft's output layer does not have all tokens.
        is_lm: whether target and draft are language models.

    Raises:
        InputError: they do not.
    """
    if distillation.patience and not options.eval_period:
        raise InputError(
            f"patience is {distillation.patience} and eval_period 0: give a period of evaluations"
        )
    if options.label_smoothing and (is_pruned or is_lm):
        kind = "a language model" if is_lm else "a draft that does not have all tokens"
        raise InputError(f"label_smoothing is {options.label_smoothing}: leave it 0 for {kind}")
    if is_lm and (distillation.outputs == "target" or distillation.on_policy):
        raise InputError(
            f"DistillOptions.outputs is {distillation.outputs!r} and on_policy "
            f"{distillation.on_policy}: give 'references' and 0 for a language model, which has no "
            "source to write an output for"
        )
