"""Distillation: a draft learns what its target says, and is measured by what is accepted.

What the draft reads are texts of the target, of the data, or of its own: of those it is to
be asked about places that its own tokens lead to (on-policy; Agarwal et al. 2023, GKD,
arXiv 2306.13649, and DistillSpec, arXiv 2310.08461). At each place it learns the target's
distribution down one of ``distillation_losses.OBJECTIVES``.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from spec_t5x.data.batching import Batch, Batches
from spec_t5x.errors import InputError
from spec_t5x.models import partitioning
from spec_t5x.models.kept_layers import own_params, with_shared
from spec_t5x.models.logical_axes import partition_spec
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5, narrowed_params
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.sampling.distributions import overlap, sampling, standardize
from spec_t5x.training.best_checkpoint import BestCheckpoint
from spec_t5x.training.held_out_alpha import AlphaWatch, HeldOutAlpha, HeldOutScores
from spec_t5x.training.losses import LossSums, token_losses
from spec_t5x.training.schedules import Schedule
from spec_t5x.training.target_texts import written_tokens
from spec_t5x.training.trainer import (
    Inputs,
    TrainOptions,
    TrainResult,
    TrainState,
    gradient_step,
    make_layout,
    model_inputs,
    run_steps,
)
from spec_t5x.types import PAD_ID, Array, Float32, Int, Key, PyTree

OUTPUTS = ("target", "references")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """What a draft is trained and measured on."""

    # Whose texts: the target's own, written once, or the references of the data.
    outputs: str = "target"
    # Of the texts that the target writes for training, and of the draft's own. 0 is argmax.
    temperature: float = 1.0
    # Share of the steps whose texts the draft writes itself, as it is then.
    on_policy: float = 0.0
    # The first so many pairs alone are trained on; None takes all.
    train_texts: int | None = None
    # The first so many held-out sources, for which the target writes at each of the
    # temperatures. alpha at the first of them says which draft is the best.
    dev_texts: int = 500
    eval_temperatures: tuple = (0.0, 1.0)
    # Drafts of an iteration, for the expected tokens that are reported (Equation 1).
    gamma: int = 4
    # Evaluations without a better alpha, after which the training stops; 0 never does.
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
    """The draft's network, and which of its parameters are learnt."""

    config: T5Config
    # Learnt: all, or ``models.kept_layers.own_params`` of a draft that shares the rest.
    params: PyTree
    # Which decoder layer of the target's each of the draft's was, where the draft shares
    # the target's encoder and embedding, and leaves them as they are.
    shared_layers: tuple[int, ...] | None = None
    # Which tokens the draft knows, where its output layer is a narrow one.
    head: NarrowHead | None = None

    def narrowed(self, target_params: PyTree, ids: np.ndarray) -> "Student":
        """The same with an output layer that knows these tokens, as it knows them now."""
        whole = self.whole(self.params, target_params)
        params = narrowed_params(self.params, whole, self.config, ids)
        # Of its own from now on, where it was the target's embedding.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        head = NarrowHead.create(ids, self.config.vocab_size)
        return dataclasses.replace(self, params=params, head=head)

    def param_shardings(self, mesh: Mesh) -> PyTree:
        """Where ``params`` lie on a mesh."""
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
        """Of every token of a text, teacher-forced; without a key there is no dropout."""
        source, shifted, text = inputs
        learns = dropout_key is not None

        def read(network: Transformer):
            # What is shared stays as it is in the target, also while the rest learns.
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
class DistillResult:
    """The best draft of a run."""

    params: PyTree  # as ``Student.params``
    step: int
    held_out: list[HeldOutAlpha]
    last: list[HeldOutAlpha]  # of the draft after the last step, the best or not
    training: TrainResult  # where the run ended

    @property
    def finished(self) -> bool:
        """Whether its steps were taken, or alpha no longer rose; False if the time ran out."""
        return self.training.finished


def distill(
    student: Student,
    target: T5Model,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    train_batches: Batches,
    held_out: Mapping[float, Batches],
    options: TrainOptions,
    distillation: DistillOptions,
    directory: str | Path,
) -> DistillResult:
    """Trains to ``options.steps``, or until alpha has not risen for long.

    Args:
        student: the draft at its start.
        target: what is imitated.
        optimizer, schedule: as of ``trainer.fit``.
        train_batches: gives batch N to step N.
        held_out: texts that the target wrote, by temperature; the first decides.
        options: ``objective`` and ``distillation_weight`` say what is minimised.
        distillation: of it, what is not in the batches already.
        directory: ``checkpoints/``, ``best/`` and ``metrics.jsonl`` are written in it.

    Raises:
        InputError: the checkpoint in ``directory`` is of another draft, or as
            ``check_options``.
    """
    check_options(distillation, options, is_narrow=student.head is not None)
    patience = distillation.patience * options.eval_period or None
    layout = make_layout(options, student.param_shardings)
    target = target.replace(params=layout.frozen(target.params, target.config))
    state = layout.placed(
        TrainState(
            step=jnp.int32(0),
            # Copied: the first step donates them.
            params=jax.tree.map(jnp.array, student.params),
            opt_state=optimizer.init(student.params),
        )
    )
    with layout.within(), BestCheckpoint(Path(directory) / "best", patience) as best:
        score = make_score(student, target, options)
        watch = AlphaWatch(score, held_out, best, gamma=distillation.gamma)
        result = run_steps(
            state,
            make_step(student, target.config, optimizer, options),
            None,
            schedule,
            train_batches,
            None,
            options,
            directory,
            frozen=target.params,
            make_inputs=_make_inputs(student, target.params, distillation, options.seed),
            watch=watch,
            layout=layout,
        )
        params = best.restore(result.state.params)
        return DistillResult(
            params=params,
            step=best.step,
            held_out=watch.measure(params),
            last=watch.last,
            training=result,
        )


def check_options(distillation: DistillOptions, options: TrainOptions, *, is_narrow: bool) -> None:
    """Whether the settings go together.

    Args:
        distillation, options: of the run.
        is_narrow: whether the draft's output layer does not know all tokens.

    Raises:
        InputError: patience is given and no period of evaluations, or labels are smoothed
            over tokens that are not known.
    """
    if distillation.patience and not options.eval_period:
        raise InputError(
            f"patience is {distillation.patience} and eval_period 0: give a period of evaluations"
        )
    if is_narrow and options.label_smoothing:
        raise InputError(
            f"label_smoothing is {options.label_smoothing}: leave it 0 for a draft that does not "
            "know all tokens"
        )


def make_step(
    student: Student,
    target_config: T5Config,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
):
    """The jitted step, see ``trainer.gradient_step``; frozen are the target's parameters."""

    def loss_fn(params, inputs, key, target_params):
        target_logits = None
        if options.learns_from_teacher:
            target_logits = _target_logits(target_config, target_params, inputs)
        logits = student.logits(params, target_params, inputs, key)
        regularisers = {"label_smoothing": options.label_smoothing, "z_loss": options.z_loss}
        return _losses(student, logits, target_logits, inputs[2], options, **regularisers)

    return gradient_step(loss_fn, optimizer, options.accumulation_steps)


def make_score(student: Student, target: T5Model, options: TrainOptions):
    """A ``held_out_alpha.Score`` of the draft."""

    @functools.partial(jax.jit, static_argnames="greedy")
    def score(params, target_params, inputs, temperature, greedy):
        target_logits = _target_logits(target.config, target_params, inputs)
        logits = student.logits(params, target_params, inputs)
        settings = dataclasses.replace(sampling(), temperature=temperature, greedy=greedy)
        betas = overlap(standardize(target_logits, settings), standardize(logits, settings))
        sums = _losses(student, logits, target_logits, inputs[2], options)
        # Sums of probabilities, rounded.
        is_token = inputs[2] != PAD_ID
        return HeldOutScores(sums=sums, betas=jnp.where(is_token, jnp.minimum(betas, 1.0), 0.0))

    def of_batch(params, inputs, temperature):
        settings = sampling(temperature)
        return score(params, target.params, inputs, settings.temperature, settings.greedy)

    return of_batch


def _losses(
    student: Student,
    logits: Float32[Array, "batch length vocab"],
    target_logits: Float32[Array, "batch length vocab"] | None,
    text: Int[Array, "batch length"],
    options: TrainOptions,
    **regularisers: float,
) -> LossSums:
    """What is minimised of a draft's logits, summed over the tokens that count."""
    if student.head is not None:
        if options.objective in ("forward_kl", "jeffreys") and target_logits is not None:
            # Infinite, of what the draft cannot say: it learns how the rest is shared out.
            knows = student.head.knows[None, None]
            target_logits = jnp.where(knows, target_logits, -jnp.inf)
        if options.distillation_weight < 1 or not options.learns_from_teacher:
            # So is the cross-entropy: other tokens of the text are passed over.
            text = jnp.where(student.head.knows[text], text, PAD_ID)
    return token_losses(
        logits,
        text,
        teacher_logits=target_logits,
        distillation_weight=options.distillation_weight,
        objective=options.objective,
        **regularisers,
    )


def _target_logits(config: T5Config, params: PyTree, inputs: Inputs) -> Array:
    return Transformer(config).apply({"params": params}, *inputs, enable_dropout=False)


def _make_inputs(student: Student, target_params: PyTree, options: DistillOptions, seed: int):
    """A ``trainer.MakeInputs``: now and then, the draft's own texts in place of a batch's.

    Which steps these are, and what is drawn in them, follows from seed, step and
    parameters, so that a resumed run reads the same texts.
    """
    key = jax.random.key(seed + 2)

    def make_inputs(state: TrainState, step: int, batch: Batch) -> Inputs:
        if np.random.default_rng([seed, step]).random() >= options.on_policy:
            return model_inputs(batch)
        source, _, text = model_inputs(batch)
        own = written_tokens(
            student.model(state.params, target_params),
            source,
            jax.random.split(jax.random.fold_in(key, step), len(source)),
            sampling(options.temperature),
            np.arange(len(source)) < batch.num_pairs,
            max_length=text.shape[1],
        )
        return source, jnp.pad(own[:, :-1], ((0, 0), (1, 0)), constant_values=PAD_ID), own

    return make_inputs
