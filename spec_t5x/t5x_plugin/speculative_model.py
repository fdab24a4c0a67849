"""The T5X models that decode speculatively and keep T5X's contract.

A speculative model is T5X's in everything but ``predict_batch_with_aux``: training, scoring
and feature conversion stay T5X's own. Decoding runs the package's loops with the package's
network over the same parameters.
"""

import math
import numbers
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging
from t5x import models, partitioning

from spec_t5x.beams.hypotheses import BeamResult
from spec_t5x.beams.search import beam_search
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.decode_state import DecodeStats
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.models.decoder_only import DecoderOnlyModel, DecoderOnlyTransformer
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.names import AUTO
from spec_t5x.sampling.draws import Stream, t5x_stream
from spec_t5x.t5x_plugin.decode_settings import (
    BeamSettings,
    SampleSettings,
    check_prompts,
    read_settings,
)
from spec_t5x.t5x_plugin.drafts import DraftSource, ModelDraft, check_draft
from spec_t5x.t5x_plugin.networks import decoder_only_config, t5_config
from spec_t5x.t5x_plugin.placing import with_divided_axes
from spec_t5x.types import PAD_ID, Array, Int, PyTree
from spec_t5x.verifiers import Verifier

# The draft's part of the tree of parameters.
DRAFT = "draft"


class SpeculativeModel:
    """To be mixed into a model of T5X, before it among the bases (``speculation.speculate``).

    The draft's parameters, where it has any, stand under ``draft`` in the model's tree.
    """

    # A model that a gin file or a program makes by itself has no draft.
    _draft: DraftSource | None = None

    def set_up(
        self,
        draft: DraftSource,
        gamma: int,
        verifier: Verifier,
        c: float | None = None,
        position: float = 0.0,
        make_partitioner: Callable[[], partitioning.PjitPartitioner] | None = None,
    ) -> None:
        """Sets what this model has beyond the stock one's attributes; see ``speculate``."""
        check_draft(draft)
        check_pace(gamma, c, position)
        self._network = self._make_network()
        self._draft = draft
        self._gamma = gamma
        self._verifier = verifier
        self._make_partitioner = make_partitioner
        self._costs = None
        if c is not None and gamma:
            self._costs = Costs.by_formula(
                c=c, position=position, largest=gamma, whole=verifier.tree(1) is not None
            )
        # Found now and not when a checkpoint has been restored; the lengths come with a batch.
        self._check_settings(read_settings(self.decode_fn, None, None, 1, sys.maxsize))
        pays = "" if c is None else f" at most, c {c:g}"
        self._summary = f"draft {draft}, gamma {gamma}{pays}, verifier {verifier}"

    def _make_network(self) -> nn.Module:
        """The package's network of the sizes of ``self.module``."""
        raise NotImplementedError

    def _target(self, params: PyTree) -> Target:
        """The package's network with parameters of the stock model."""
        raise NotImplementedError

    def _check_settings(self, settings: SampleSettings | BeamSettings) -> None:
        """Refuses settings that the draft cannot decode with."""
        raise NotImplementedError

    @property
    def draft_source(self) -> DraftSource:
        """The draft that the model proposes with.

        Raises:
          InputError: ``speculate`` did not make the model.
        """
        if self._draft is None:
            raise InputError(
                f"a {type(self).__name__} has no draft: bind MODEL to @speculation.speculate(), as "
                "gin_configs/t5x/speculate.gin does"
            )
        return self._draft

    @property
    def _eos_id(self) -> int:
        # As T5X has it for a vocabulary without one.
        return self.output_vocabulary.eos_id or 1

    def get_initial_variables(self, rng, *args, **kwargs):
        """T5X's variables, and the draft's beside them in each collection."""
        draft = self.draft_source
        logging.info("Decoding speculatively: %s", self._summary)
        variables = super().get_initial_variables(rng, *args, **kwargs)
        variables = dict(flax.core.unfreeze(variables))
        target = jax.eval_shape(self._target, variables["params"])
        drafts = draft.variables(rng, target, self.output_vocabulary) or {}
        if isinstance(draft, ModelDraft) and self._make_partitioner is not None:
            drafts = with_divided_axes(drafts, self._make_partitioner(), draft.position_bytes)
        for collection, values in flax.core.unfreeze(drafts).items():
            variables[collection] = {**variables[collection], DRAFT: values}
        return flax.core.freeze(variables)

    def read_draft(self, params: PyTree) -> PyTree:
        """Parameters of a draft by name, for the stock model with these ``params``."""
        return self._draft.params(self._target(params), self.output_vocabulary)

    def _compute_logits(self, params, *args, **kwargs):
        return super()._compute_logits(split_params(params)[0], *args, **kwargs)

    def _sample(
        self,
        target: Target,
        draft: Draft,
        inputs: Int[Array, "batch source"],
        prompts: Int[Array, "batch width"],
        settings: SampleSettings,
        *,
        starts: Int[Array, "batch"],
        num_decodes: int,
        max_decode_len: int,
    ) -> Decoded:
        """What T5X's ``temperature_sample`` gives; ``starts`` is where it begins each row."""
        starts = jnp.repeat(starts, num_decodes)
        return speculative_decode(
            target,
            draft,
            inputs,
            prompts,
            random_stream(settings, self._verifier, starts, max_decode_len),
            settings.sampling,
            gamma=self._gamma,
            max_decode_len=max_decode_len,
            max_decode_steps=settings.max_decode_steps,
            num_decodes=num_decodes,
            verifier=self._verifier,
            eos_id=settings.eos_id,
            rescale_log_probs=settings.rescale_log_probs,
            # What is learned ends with the batch, and so has to cost little.
            pace=None if self._costs is None else Pace.start(self._costs),
        )


class SpeculativeEncoderDecoderModel(SpeculativeModel, models.EncoderDecoderModel):
    """``t5x.models.EncoderDecoderModel`` with a draft.

    ``speculation.speculate`` makes one of a stock model.
    """

    def _make_network(self) -> Transformer:
        return Transformer(t5_config(self.module))

    def _check_settings(self, settings: SampleSettings | BeamSettings) -> None:
        if isinstance(settings, BeamSettings) and self._gamma and not self._draft.searches:
            raise InputError(
                f"decode_fn is beam_search and draft {self._draft} cannot search: add --gin_file="
                "gin_configs/t5x/greedy.gin, or give a draft model (speculate.gin alone) or GAMMA 0"
            )

    def _target(self, params: PyTree) -> T5Model:
        return T5Model(weights=params, module=self._network)

    def predict_batch_with_aux(
        self,
        params: PyTree,
        batch: Mapping[str, Array],
        rng: Array | None = None,
        decoder_params: MutableMapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: int | None = None,
        prompt_with_targets: bool = False,
    ) -> tuple[Array, Mapping[str, Array]]:
        """Decodes a batch: the text and scores, arguments and defaults of T5X's own method.

        One difference is left: a beam search whose prompt fills the row generates a token,
        where T5X repeats the prompt's last one.

        Returns:
          ``[batch, length]`` tokens, or ``[batch, num_decodes, length]`` by increasing
          score if ``return_all_decodes``; and for each of them ``scores`` and the counts
          of ``acceptance_aux``.

        Raises:
          InputError: a setting that cannot be honoured.
        """
        defaults = self._default_decoder_params
        return_all_decodes = (
            defaults.return_all_decodes if return_all_decodes is None else return_all_decodes
        )
        num_decodes = defaults.num_decodes if num_decodes is None else num_decodes
        targets = jnp.asarray(batch["decoder_input_tokens"], jnp.int32)
        settings = read_settings(
            self.decode_fn, decoder_params, rng, self._eos_id, max_decode_len=targets.shape[1]
        )
        target_params, draft_params = split_params(params)
        target = self._target(target_params)
        draft = self._draft.make(target, draft_params, self.output_vocabulary)
        inputs = jnp.asarray(batch["encoder_input_tokens"], jnp.int32)
        prompts = jnp.zeros((targets.shape[0], 1), jnp.int32)
        if prompt_with_targets:
            # T5X takes the end of sequence out of a prompt, so that it does not end the row.
            prompts = targets * (targets != self._eos_id)
            check_prompts(prompts)
        arguments = (target, draft, inputs, prompts, settings)
        common = {"num_decodes": num_decodes, "max_decode_len": targets.shape[1]}
        if isinstance(settings, BeamSettings):
            result = self._search(*arguments, **common)
        else:
            # T5X's encoder-decoders force prompts token by token: every row starts at 0.
            starts = jnp.zeros(targets.shape[0], jnp.int32)
            result = self._sample(*arguments, starts=starts, **common)
        return pick_decodes(result, return_all_decodes)

    def _search(
        self,
        target: T5Model,
        draft: Draft,
        inputs: Int[Array, "batch source"],
        prompts: Int[Array, "batch width"],
        settings: BeamSettings,
        *,
        num_decodes: int,
        max_decode_len: int,
    ) -> BeamResult:
        room = settings.max_decode_len or max_decode_len
        if prompts.shape[1] > 1 + room:
            check_prompts(prompts, room)
            prompts = prompts[:, : 1 + room]
        common = {
            "beams": num_decodes,
            "alpha": settings.alpha,
            "max_decode_len": room,
            "eos_id": settings.eos_id,
        }
        if self._gamma:
            common |= {"draft_model": draft.model, "gamma": self._gamma}
        return beam_search(target, inputs, prompts, **common)


class SpeculativeDecoderOnlyModel(SpeculativeModel, models.DecoderOnlyModel):
    """``t5x.models.DecoderOnlyModel`` with a draft, causal or with a prefix.

    ``speculation.speculate`` makes one of a stock model.
    """

    def _make_network(self) -> DecoderOnlyTransformer:
        return DecoderOnlyTransformer(decoder_only_config(self.module))

    def _target(self, params: PyTree) -> DecoderOnlyModel:
        return DecoderOnlyModel(
            weights=params, module=self._network, prefix_lm=self._inputs_bidirectional_attention
        )

    def _check_settings(self, settings: SampleSettings | BeamSettings) -> None:
        if isinstance(settings, BeamSettings):
            raise InputError(
                "decode_fn is beam_search: decode a decoder-only model with temperature_sample"
            )

    def predict_batch_with_aux(
        self,
        params: PyTree,
        batch: Mapping[str, Array],
        rng: Array | None = None,
        *,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        decoder_params: MutableMapping[str, Any] | None = None,
    ) -> tuple[Array, Mapping[str, Array]]:
        """Continues each prompt of the batch; arguments and defaults are T5X's.

        Returns:
          As ``SpeculativeEncoderDecoderModel``; the prompts are not part of the text.

        Raises:
          InputError: a batch without prompts, or a setting that cannot be honoured.
        """
        if "decoder_causal_attention" not in batch:
            raise InputError(
                "the batch has no decoder_causal_attention: give inputs and targets in "
                "task_feature_lengths"
            )
        tokens = jnp.asarray(batch["decoder_input_tokens"], jnp.int32)
        prompts = tokens * jnp.asarray(batch["decoder_causal_attention"], jnp.int32)
        check_prompts(prompts)
        max_decode_len = tokens.shape[1]
        settings = read_settings(self.decode_fn, decoder_params, rng, self._eos_id, max_decode_len)
        target_params, draft_params = split_params(params)
        target = self._target(target_params)
        lengths = jnp.sum(prompts[:, 1:] != PAD_ID, axis=1, dtype=jnp.int32)
        result = self._sample(
            target,
            self._draft.make(target, draft_params, self.output_vocabulary),
            prompts,
            prompts,
            settings,
            starts=lengths,
            num_decodes=num_decodes,
            max_decode_len=max_decode_len,
        )
        without = jax.vmap(_without_prefix)(result.tokens, lengths)
        return pick_decodes(result.replace(tokens=without), return_all_decodes)


def _without_prefix(tokens: Array, length: Array) -> Array:
    """``[decodes, length]`` tokens of one input, moved left over the prompt; then padding."""
    positions = jnp.arange(tokens.shape[1])
    moved = jnp.roll(tokens, -length, axis=1)
    return jnp.where((positions < tokens.shape[1] - length)[None, :], moved, PAD_ID)


def check_pace(gamma: int, c: float | None, position: float) -> None:
    """Refuses what is no gamma and no cost."""
    if gamma == AUTO:
        raise InputError(
            f"gamma is {AUTO!r}: a T5X launch measures no times, give a number, and with it C (the "
            "time of a draft step in target steps, as in 0.05) to draft as many tokens as pay"
        )
    if not isinstance(gamma, numbers.Integral) or isinstance(gamma, bool) or gamma < 0:
        raise InputError(
            f"gamma is {gamma!r}: give a whole number of at least 0 (0 is plain decoding)"
        )
    for name, value in {"c": c, "position": position}.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and 0 <= value < math.inf) and (name, value) != ("c", None):
            raise InputError(f"{name} is {value!r}: give a number of at least 0, in target steps")
    if position and c is None:
        raise InputError(f"position is {position} without c: give it too")


def split_params(params: PyTree) -> tuple[PyTree, PyTree | None]:
    """The target's parameters and the draft's, None where it has none."""
    params = dict(flax.core.unfreeze(params))
    return params, params.pop(DRAFT, None)


def random_stream(
    settings: SampleSettings,
    verifier: Verifier,
    starts: Int[Array, "rows"],
    num_steps: int,
) -> Array | Stream:
    """What the loops draw with: T5X's own chain of keys where the verifier can follow it."""
    rng = settings.rng
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)
    is_threefry = str(jax.random.key_impl(rng)) == "threefry2x32"
    if verifier.coupled:
        if not is_threefry:
            raise InputError(
                f"the key is of JAX's {jax.random.key_impl(rng)}: the coupled verifier follows "
                "T5X's threefry keys; leave set_hardware_rng_ops out, or take another verifier"
            )
        own_temperatures = settings.sampling.temperature.ndim == 1
        return t5x_stream(rng, starts, num_steps, same_for_rows=own_temperatures)
    if is_threefry:
        return rng
    # The hardware's generators draw the same for all rows of a vmap, as keys of rows are made.
    return jax.random.key(jax.random.bits(rng, dtype=jnp.uint32), impl="threefry2x32")


def pick_decodes(
    result: Decoded | BeamResult, return_all_decodes: bool
) -> tuple[Array, dict[str, Array]]:
    """T5X's return values: all decodes of an input, or the last, which scores highest."""
    aux = {"scores": result.scores, **acceptance_aux(result)}
    if return_all_decodes:
        return result.tokens, aux
    return result.tokens[:, -1], {name: values[:, -1] for name, values in aux.items()}


def acceptance_aux(result: Decoded | BeamResult) -> dict[str, Array]:
    """What there is to know of acceptance, each ``[batch, num_decodes, ...]``.

    Of sampling: ``target_calls``, ``appended``, ``proposed``, ``accepted``, ``verified`` and
    ``beta_sum`` (``DecodeStats``), and ``accepted_by_position [..., gamma]`` and
    ``verified_by_position``. Of a beam search: ``target_calls`` and ``steps`` of the input,
    the same for all its hypotheses.
    """
    stats = result.stats
    if isinstance(stats, DecodeStats):
        counts = ("target_calls", "appended", "proposed", "accepted", "verified", "beta_sum")
        by_position = ("accepted_by_position", "verified_by_position")
        has_positions = stats.accepted_by_position.shape[-1] > 0
        names = counts + by_position if has_positions else counts
        return {name: getattr(stats, name) for name in names}
    shape = result.scores.shape
    return {
        name: jnp.broadcast_to(getattr(stats, name)[:, None], shape)
        for name in ("target_calls", "steps")
    }
