"""Distillation: a draft learns its target's distributions, and is evaluated by alpha.

The draft is trained on the target's outputs, on the references of the data, or on outputs that it
samples itself, so that it learns at the positions that drafting reaches (on-policy; Agarwal et al.
2023, GKD, arXiv 2306.13649, and DistillSpec, arXiv 2310.08461). The loss at a position is one of
``distillation_losses.OBJECTIVES``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spec_t5x.errors import InputError, check_at_least, check_choice
from spec_t5x.labs.list_options import as_lists
from spec_t5x.labs.training.batching import Batches, PairBatch
from spec_t5x.labs.training.held_out_alpha import HeldOutAlpha
from spec_t5x.labs.training.interfaces import Inputs, Learner, TrainOptions, model_inputs
from spec_t5x.labs.training.learners import TargetReading, network_logits, read_target
from spec_t5x.labs.training.losses import LossSums, token_losses
from spec_t5x.labs.training.student import Student
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.options import check_types
from spec_t5x.sampling.distributions import Sampling, overlap, sampling, standardize
from spec_t5x.types import EOS_ID, PAD_ID, Array, Bool, Float32, Int, Key, PyTree

OUTPUTS = ("target", "references")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Options of the texts that a draft is trained and measured on."""

    # The training texts: outputs of the "target", sampled once, or the data's "references".
    outputs: str = "target"
    # Temperature at which target and draft are sampled for training. 0 is argmax.
    temperature: float = 1.0
    # Share of the steps that train on outputs of the draft, sampled in that step.
    on_policy: float = 0.0
    # Number of pairs to train on, from the first; None takes all.
    train_texts: int | None = None
    # Number of held-out sources to evaluate on, with the target's outputs at each of the
    # temperatures. The best draft has the largest alpha at the first temperature.
    dev_texts: int = 500
    eval_temperatures: tuple = (0.0, 1.0)
    # Tokens per proposal, for the expected tokens per iteration that are reported (Equation 1).
    gamma: int = 4
    # Number of evaluations without a larger alpha after which the training stops; 0 disables it.
    patience: int = 0

    def __post_init__(self):
        check_choice("outputs", self.outputs, OUTPUTS)
        as_lists(self, eval_temperatures=1)
        check_types(self)
        for temperature in (self.temperature, *self.eval_temperatures):
            sampling(temperature)
        if not 0.0 <= self.on_policy <= 1.0:
            raise InputError(f"on_policy is {self.on_policy}: give a number from 0 to 1")
        check_at_least(self, dev_texts=1, gamma=1, patience=0, train_texts=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLearner(Learner):
    """The learner of a draft, which minimizes ``options.objective`` and is evaluated by alpha.

    The held-out data of a run are ``Batches`` by the temperature that the target sampled them at;
    the best draft has the largest alpha at the first temperature.
    """

    student: Student
    target: CachedModel
    distillation: DistillOptions
    options: TrainOptions

    keeps_best = True

    @property
    def patience(self) -> int:
        """``DistillOptions.patience``, converted from evaluations to steps."""
        return self.distillation.patience * self.options.eval_period

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Returns the student's parameters; ``key`` is not used."""
        return self.student.params

    def shardings(self, mesh: Mesh) -> PyTree:
        """Returns a ``NamedSharding`` for each of the student's parameters."""
        return self.student.param_shardings(mesh)

    def loss(
        self,
        params: PyTree,
        inputs: Inputs,
        key: Key[Array, ""] | None,
        target_params: PyTree,
    ) -> LossSums:
        """Sums the objective; label smoothing and z-loss are part of its cross-entropy."""
        options, read_by_target = self.options, None
        if options.uses_target or self.student.unrolled_steps:
            read_by_target = self._read_target(target_params, inputs)
        logits = self.student.logits(params, target_params, inputs, read_by_target, key)
        target_logits = read_by_target.logits if options.uses_target else None
        regularizers = {"label_smoothing": options.label_smoothing, "z_loss": options.z_loss}
        return self.losses(logits, target_logits, inputs[2], **regularizers)

    def _read_target(self, target_params: PyTree, inputs: Inputs) -> TargetReading:
        """Runs the target over the texts; the result has states only if the draft needs them."""
        if self.student.unrolled_steps:
            return read_target(self.target.with_params(target_params), inputs)
        return TargetReading(logits=network_logits(self.target.config, target_params, inputs))

    def losses(
        self,
        logits: Float32[Array, "batch length vocab"],
        target_logits: Float32[Array, "batch length vocab"] | None,
        text: Int[Array, "batch length"],
        **regularizers: float,
    ) -> LossSums:
        """Sums the objective over ``text``; masks tokens that a narrow head, if any, lacks."""
        options, head = self.options, self.student.head
        if head is not None:
            if options.objective in ("forward_kl", "jeffreys") and target_logits is not None:
                # Tokens that the draft lacks would dominate the divergence: the draft learns
                # the target's distribution, normalized over the head's tokens.
                target_logits = jnp.where(head.knows[None, None], target_logits, -jnp.inf)
            if options.distillation_weight < 1 or not options.uses_target:
                # Their cross-entropy would be huge as well, so their positions are skipped.
                text = jnp.where(head.knows[text], text, PAD_ID)
        return token_losses(
            logits,
            text,
            target_logits=target_logits,
            distillation_weight=options.distillation_weight,
            objective=options.objective,
            **regularizers,
        )

    def inputs(self, params: PyTree, target_params: PyTree, step: int, batch: PairBatch) -> Inputs:
        """Returns the batch's arrays or, in a share ``on_policy`` of the steps, texts of the draft.

        The draft samples these texts for the batch's sources. Choice and samples follow from seed,
        step and parameters, so that a resumed run reads the same texts.
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
        """Measures loss and alpha on each temperature's batches; ``place`` is not used."""
        found, given = [], (params, target_params)
        for temperature, batches in dev.items():
            batches, settings = list(batches.one_pass()), sampling(temperature)
            # The scores are fetched after the loop, so that the device never waits for the host.
            scores = [self.score(*given, model_inputs(batch), settings) for batch in batches]
            options = {"temperature": temperature, "gamma": self.distillation.gamma}
            found.append(HeldOutAlpha.of(batches, jax.device_get(scores), **options))
        return found

    @functools.cached_property
    def score(self):
        """Function of (params, target_params, inputs, settings) to ``HeldOutAlpha.of``'s scores."""

        @jax.jit
        def score(params, target_params, inputs, settings):
            read_by_target = self._read_target(target_params, inputs)
            logits = self.student.logits(params, target_params, inputs, read_by_target)
            given = read_by_target.logits, inputs[2]
            betas = overlap(*(standardize(each, settings) for each in (given[0], logits)))
            # Sums of probabilities may exceed 1 by rounding.
            betas = jnp.where(inputs[2] != PAD_ID, jnp.minimum(betas, 1.0), 0.0)
            return self.losses(logits, *given), betas

        return score


@functools.partial(jax.jit, static_argnames="max_length")
def sample_outputs(
    model: T5Model,
    sources: Int[Array, "batch source"],
    keys: Key[Array, "batch"],
    settings: Sampling,
    is_row: Bool[Array, "batch"],
    *,
    max_length: int,
) -> Int[Array, "batch length"]:
    """Samples an output for each source, padded as a batch's targets are.

    ``keys`` has a random key for each row. Rows where ``is_row`` is False are all padding.
    """
    # The source of a padding row must not be empty, because attention needs a position.
    sources = sources.at[:, 0].set(jnp.where(sources[:, 0] == PAD_ID, EOS_ID, sources[:, 0]))
    decoded = autoregressive_decode(
        model,
        sources,
        jnp.full((sources.shape[0], 1), PAD_ID, jnp.int32),
        keys,
        settings,
        max_decode_len=max_length,
        max_decode_steps=jnp.where(is_row, max_length, 0),
    )
    tokens = decoded.tokens[:, 0]
    # A model may generate the padding id, which training would take for the end of the text.
    return tokens * jnp.cumprod(tokens != PAD_ID, axis=1)
