"""Distillation: a draft learns its target's distributions, and is evaluated by alpha.

The draft is trained on the target's outputs, on the references of the data, or on outputs that it
samples itself, so that it learns at the positions that drafting reaches (on-policy; Agarwal et al.
2023, GKD, arXiv 2306.13649, and DistillSpec, arXiv 2310.08461). The loss at a position is one of
``distillation_losses.OBJECTIVES``.

The training of an EAGLE head imitates drafting ("training-time test" of EAGLE-3, Li et al. 2025,
arXiv 2503.01840): the network is unrolled over several draft steps, and each step attends to the
inputs that it would have cached by then.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from spec_t5x.errors import InputError, check_at_least, check_choice
from spec_t5x.labs.list_options import as_lists
from spec_t5x.labs.training.batching import Batches, PairBatch
from spec_t5x.labs.training.held_out_alpha import HeldOutAlpha
from spec_t5x.labs.training.interfaces import Inputs, Learner, TrainOptions, model_inputs
from spec_t5x.labs.training.kept_layers import narrowed_params, with_shared
from spec_t5x.labs.training.learners import TargetReading, network_logits, read_target
from spec_t5x.labs.training.losses import LossSums, token_losses
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.models import partitioning
from spec_t5x.models.attention import mask_bias
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.eagle import EagleNetwork
from spec_t5x.models.logical_axes import partition_spec
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.t5 import CachedNetwork, NetworkConfig, Transformer
from spec_t5x.options import check_types
from spec_t5x.sampling.distributions import Sampling, overlap, sampling, standardize
from spec_t5x.types import EOS_ID, PAD_ID, Array, Bool, Float, Float32, Int, Key, PyTree

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
class Student:
    """The draft's network and its trained parameters."""

    config: NetworkConfig
    # The trained parameters: all, or those not shared with the target (``own_params``).
    params: PyTree
    # If the draft shares the target's encoder and embedding, which are frozen: the index of the
    # target's decoder layer that each of the draft's is copied from. None if it shares nothing.
    shared_layers: tuple[int, ...] | None = None
    # The tokens of a pruned output layer, which only a draft that shares parameters has; None if
    # the layer has the whole vocabulary.
    head: NarrowHead | None = None
    # Number of drafting steps that an EAGLE head (``models.eagle``) learns; 0 for other drafts.
    unrolled_steps: int = 0

    def narrowed(self, target_params: PyTree, ids: np.ndarray) -> "Student":
        """Returns the student with its output layer pruned to the tokens ``ids``."""
        whole = self.whole(self.params, target_params)
        params = narrowed_params(self.params, whole, self.config, ids)
        # The pruned layer is trained, in float32, even if it was the target's embedding.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        head = NarrowHead.create(ids, self.config.vocab_size)
        return dataclasses.replace(self, params=params, head=head)

    def param_shardings(self, mesh: Mesh) -> PyTree:
        """Returns a ``NamedSharding`` for each of ``params``."""
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
            shardings |= {"decoder": decoder, "narrow_head": {"kernel": kernel}}
        return shardings

    def whole(self, params: PyTree, target_params: PyTree) -> PyTree:
        """Returns all parameters of the network: ``params``, and those shared with the target."""
        if self.shared_layers is None:
            return params
        return with_shared(params, target_params, self.shared_layers)

    def model(self, params: PyTree, target_params: PyTree) -> T5Model:
        """Returns the draft as a model: with ``params``, and those shared with the target."""
        model = T5Model.create(self.whole(params, target_params), self.config)
        if self.head is None:
            return model
        return NarrowT5.narrowed(model, self.head, params["narrow_head"]["kernel"])

    def logits(
        self,
        params: PyTree,
        target_params: PyTree,
        inputs: Inputs,
        read_by_target: TargetReading | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float32[Array, "batch length vocab"]:
        """Computes the draft's logits for each token of a text, teacher-forced.

        An EAGLE head needs ``read_by_target``; its states differ by drafting step. Successive
        tokens use the steps in turn, so that one call of the output layer trains all steps.
        """
        if self.shared_layers is None:
            return network_logits(self.config, params, inputs, dropout_key)
        source, shifted, text = inputs
        learns, steps = dropout_key is not None, self.unrolled_steps

        def read(network: CachedNetwork):
            if steps:
                given = read_by_target.encoded, source, shifted, read_by_target.states, steps
                unrolled = unroll(network, *given, enable_dropout=learns)
                in_turn = _steps_in_turn(shifted.shape, steps)[..., None]
                states = unrolled[0]
                for step in range(1, steps):
                    states = jnp.where(in_turn == step, unrolled[step], states)
            else:
                # The encoder is the target's, which is frozen and has no dropout.
                given = network.encode(source), source, shifted, text
                states = network.decode_states(*given, enable_dropout=learns)
            if self.head is None:
                return network.logits(states)
            return self.head.logits(params["narrow_head"]["kernel"], states)

        network = EagleNetwork(self.config) if steps else Transformer(self.config)
        variables = {"params": self.whole(params, target_params)}
        return network.apply(
            variables, method=read, rngs={"dropout": dropout_key} if learns else None
        )


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


def unroll(
    network: EagleNetwork,
    encoded: Float[Array, "batch source target_embed"],
    source: Int[Array, "batch source"],
    shifted: Int[Array, "batch length"],
    states: Float[Array, "batch length target_states"],
    num_steps: int,
    *,
    enable_dropout: bool = False,
) -> list[Float[Array, "batch length embed"]]:
    """Returns a head's states at all positions of a text in its first, second, … draft step.

    The states of step i are undefined at the first i positions; both count from 0. ``encoded``
    and ``states`` are the target's states of the source and of the text, and ``shifted`` is
    the text with its start token first.
    """
    cross_bias, decoder = mask_bias((source > 0)[:, None, None, :]), network.decoder
    distances = jnp.arange(shifted.shape[1])[:, None] - jnp.arange(shifted.shape[1])[None]
    earlier: list[list[Array]] = [[] for _ in decoder.layers]
    unrolled, states = [], network.reduction(states)
    for step in range(num_steps):
        # Text before the drafted tokens was fed with the target's states.
        seen = [distances >= step, *(distances == step - i for i in range(1, step + 1))]
        masks = [mask_bias(each)[None, None] for each in seen]
        states = network.fused(shifted, jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0))))
        for layer, inputs in zip(decoder.layers, earlier, strict=True):
            relpos = layer.relpos_bias or decoder.relpos_bias
            bias = relpos.full(shifted.shape[1], False)
            *before, own = [bias + mask for mask in masks]
            before = list(zip(inputs, before, strict=True))
            inputs.append(states)
            states = layer(states, encoded, own, cross_bias, not enable_dropout, before)
        states = decoder.decoder_norm(states)
        unrolled.append(states)
    return unrolled


def _steps_in_turn(shape: tuple[int, int], num_steps: int) -> Int[Array, "batch length"]:
    """Assigns a drafting step, from 0, to each token: at most the token's position in the text."""
    rows, positions = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return jnp.minimum((rows + positions) % num_steps, positions)


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
