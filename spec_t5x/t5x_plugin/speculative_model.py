"""T5X models that decode speculatively and keep T5X's contract.

A speculative model differs from T5X's in ``predict_batch_with_aux`` alone: it runs the package's
loops with the package's network over the same parameters. Training, scoring and feature conversion
are T5X's own.
"""

import math
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
from absl import logging
from t5x import models, partitioning

from spec_t5x.beams.hypotheses import BeamResult, Ranking
from spec_t5x.beams.search import beam_search
from spec_t5x.errors import InputError, check_numbers, is_number
from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, DecodeStats
from spec_t5x.loops.outputs import Decoded, prompt_lengths
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.models.decoder_only import DecoderOnlyModel, DecoderOnlyTransformer
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.names import AUTO
from spec_t5x.sampling.draws import Stream, t5x_stream
from spec_t5x.sampling.random_bits import THREEFRY, threefry
from spec_t5x.t5x_plugin.decode_settings import (
    BeamSettings,
    SampleSettings,
    check_prompts,
    read_settings,
)
from spec_t5x.t5x_plugin.drafts import DraftSource, ModelDraft
from spec_t5x.t5x_plugin.networks import decoder_only_config, t5_config
from spec_t5x.t5x_plugin.placing import with_divided_axes
from spec_t5x.t5x_plugin.remaking import bindings_of
from spec_t5x.types import PAD_ID, Array, Int, PyTree
from spec_t5x.verifiers import Verifier

# Name of the draft's parameters in the model's tree.
DRAFT = "draft"


class SpeculativeModel:
    """Mixin that precedes a model of T5X among the bases; ``speculation.speculate`` sets it up.

    The draft's parameters are under ``draft`` in the model's tree. A subclass has
    ``_make_network()``, the package's network of the sizes of ``self.module``; ``_target(params)``,
    that network with the stock model's parameters; and ``_check_settings(settings)``, which refuses
    settings that the draft cannot decode with.
    """

    # None in a model that gin or a program makes without ``speculate``.
    _draft: DraftSource | None = None

    def set_up(
        self,
        draft: DraftSource,
        gamma: int,
        verifier: Verifier,
        c: float | None = None,
        position: float = 0.0,
        make_partitioner: Callable[[], partitioning.PjitPartitioner] | None = None,
        kv: str = AUTO,
        statistics: bool = True,
    ) -> None:
        """Sets the attributes that the stock model lacks; ``speculate`` describes the arguments."""
        if not isinstance(draft, DraftSource):
            raise InputError(
                f"draft is {draft!r}: give @drafts.ModelDraft() or, for a name, DRAFT_NAME with "
                "gin_configs/t5x/draft_by_name.gin"
            )
        check_pace(gamma, c, position)
        self._network, self._kv = self._make_network(), kv
        # Checks ``kv``.
        self._target({})
        self._draft, self._gamma, self._verifier = draft, gamma, verifier
        self._make_partitioner, self._statistics = make_partitioner, statistics
        # T5X's default for a vocabulary without one.
        self._eos_id = self.output_vocabulary.eos_id or 1
        whole = verifier.tree(1) is not None
        costs = {"c": c, "position": position, "largest": gamma, "whole": whole}
        self._costs = None if c is None else Costs.by_formula(**costs)
        # Checks settings before a checkpoint is restored; lengths are known once there is a batch.
        self._check_settings(read_settings(self.decode_fn, None, None, 1, sys.maxsize))
        pays = "" if c is None else f" at most, c {c:g}"
        self._summary = f"draft {draft}, gamma {gamma}{pays}, verifier {verifier}, kv {kv}"

    def get_initial_variables(self, rng, *args, **kwargs):
        """Returns T5X's variables, with the draft's under ``draft`` in each collection."""
        draft = draft_of(self)
        logging.info("Decoding speculatively: %s", self._summary)
        variables = dict(flax.core.unfreeze(super().get_initial_variables(rng, *args, **kwargs)))
        target = jax.eval_shape(self._target, variables["params"])
        drafts = draft.variables(rng, target, self.output_vocabulary)
        for program in ("__main__.infer", "__main__.evaluate") if drafts else ():
            if not bindings_of(program, resolve_references=False).get("use_orbax", True):
                raise InputError("use_orbax is False, which restores no draft: leave use_orbax out")
        if isinstance(draft, ModelDraft) and self._make_partitioner is not None:
            drafts = with_divided_axes(drafts, self._make_partitioner())
        for collection, values in flax.core.unfreeze(drafts).items():
            variables[collection] = {**variables[collection], DRAFT: values}
        return flax.core.freeze(variables)

    def read_draft(self, params: PyTree) -> PyTree:
        """Reads the parameters of a ``NamedDraft``; ``params`` are those of the stock model."""
        return self._draft.params(self._target(params), self.output_vocabulary)

    def _compute_logits(self, params, *args, **kwargs):
        return super()._compute_logits(split_params(params)[0], *args, **kwargs)

    def _pair(self, params: PyTree) -> tuple[Target, Draft]:
        """Returns target and draft, whose parameters are both in ``params``."""
        params, of_draft = split_params(params)
        target = self._target(params)
        return target, self._draft.make(target, of_draft, self.output_vocabulary)

    def _sample(
        self,
        params: PyTree,
        inputs: Int[Array, "batch source"],
        prompts: Int[Array, "batch width"],
        settings: SampleSettings,
        num_decodes: int,
        max_decode_len: int,
        starts: Int[Array, "batch"] | None = None,
    ) -> Decoded:
        """Decodes as ``temperature_sample``, which begins each row at the length in ``starts``.

        If that is None, T5X forces the prompt token by token, after a 0 in place of any BOS.
        """
        steps = settings.max_decode_steps
        # T5X counts a feature converter's BOS among the prompt's tokens.
        steps = None if steps is None else steps + jnp.int32(prompts[:, 0] != PAD_ID)
        if starts is None:
            starts, prompts = jnp.zeros_like(prompts[:, 0]), prompts.at[:, 0].set(PAD_ID)
        starts = jnp.repeat(starts, num_decodes)
        return speculative_decode(
            *self._pair(params),
            inputs,
            prompts,
            random_stream(settings, self._verifier, starts, max_decode_len),
            settings.sampling,
            gamma=self._gamma,
            max_decode_len=max_decode_len,
            max_decode_steps=steps,
            num_decodes=num_decodes,
            verifier=self._verifier,
            eos_id=settings.eos_id,
            rescale_log_probs=settings.rescale_log_probs,
            # The pace of a batch does not depend on earlier batches.
            pace=None if self._costs is None else Pace.start(self._costs),
        )


class SpeculativeEncoderDecoderModel(SpeculativeModel, models.EncoderDecoderModel):
    """``t5x.models.EncoderDecoderModel`` with a draft; ``speculation.speculate`` makes it."""

    def _make_network(self) -> Transformer:
        return Transformer(t5_config(self.module))

    def _target(self, params: PyTree) -> T5Model:
        return T5Model(weights=params, module=self._network).with_kv(self._kv)

    def _check_settings(self, settings: SampleSettings | BeamSettings) -> None:
        if not isinstance(settings, BeamSettings):
            return
        for name, is_set, has in (
            ("C", self._costs is not None, "always drafts GAMMA tokens"),
            ("VERIFIER", self._verifier != DEFAULT_VERIFIER, "has no verifier"),
        ):
            if is_set:
                raise InputError(
                    f"decode_fn is beam_search, which {has}: leave {name} out, or add "
                    "--gin_file=gin_configs/t5x/greedy.gin"
                )
        if self._gamma and not self._draft.searches:
            raise InputError(
                f"decode_fn is beam_search and draft {self._draft} cannot search: add --gin_file="
                "gin_configs/t5x/greedy.gin (for a model of your own class bind its decode_fn), "
                "or give a draft model (speculate.gin alone) or GAMMA 0"
            )

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
        """Decodes a batch; texts, scores, arguments and defaults are those of T5X's method.

        There is one difference: a beam search whose prompt fills the row generates a token, where
        T5X repeats the prompt's last one.

        Returns:
          Tokens ``[batch, length]``, or ``[batch, num_decodes, length]`` by increasing score if
          ``return_all_decodes``; and a dictionary of ``scores`` and ``acceptance_aux``.

        Raises:
          InputError: a setting that the loops do not support.
        """
        defaults = self._default_decoder_params
        if return_all_decodes is None:
            return_all_decodes = defaults.return_all_decodes
        num_decodes = defaults.num_decodes if num_decodes is None else num_decodes
        check_numbers(1, num_decodes=num_decodes)
        targets = jnp.asarray(batch["decoder_input_tokens"], jnp.int32)
        inputs = jnp.asarray(batch["encoder_input_tokens"], jnp.int32)
        rows, max_decode_len = targets.shape
        settings = read_settings(self.decode_fn, decoder_params, rng, self._eos_id, max_decode_len)
        searches = isinstance(settings, BeamSettings)
        prompts = jnp.zeros((rows, 1), jnp.int32)
        if prompt_with_targets:
            # T5X removes the end of sequence from a prompt, so that it does not end the row.
            prompts = targets * (targets != self.output_vocabulary.eos_id)
            check_prompts(prompts, end=settings.eos_id if searches else None)
        decode = self._search if searches else self._sample
        result = decode(params, inputs, prompts, settings, num_decodes, max_decode_len)
        return pick_decodes(result, return_all_decodes, self._statistics)

    def _search(
        self,
        params: PyTree,
        inputs: Int[Array, "batch source"],
        prompts: Int[Array, "batch width"],
        settings: BeamSettings,
        num_decodes: int,
        max_decode_len: int,
    ) -> BeamResult:
        target, draft = self._pair(params)
        # As in ``_sample``.
        prompts = prompts.at[:, 0].set(PAD_ID)
        room = settings.max_decode_len or max_decode_len
        if prompts.shape[1] > 1 + room:
            check_prompts(prompts, room)
            prompts = prompts[:, : 1 + room]
        common = {
            "beams": num_decodes,
            "ranking": Ranking(exponent=settings.alpha),
            "max_decode_len": room,
            "eos_id": settings.eos_id,
        }
        if self._gamma:
            common |= {"draft_model": draft.model, "gamma": self._gamma}
        return beam_search(target, inputs, prompts, **common)


class SpeculativeDecoderOnlyModel(SpeculativeModel, models.DecoderOnlyModel):
    """``t5x.models.DecoderOnlyModel`` with a draft, causal or with a prefix.

    ``speculation.speculate`` makes it.
    """

    def _make_network(self) -> DecoderOnlyTransformer:
        return DecoderOnlyTransformer(decoder_only_config(self.module))

    def _target(self, params: PyTree) -> DecoderOnlyModel:
        prefix_lm = self._inputs_bidirectional_attention
        model = DecoderOnlyModel(weights=params, module=self._network, prefix_lm=prefix_lm)
        return model.with_kv(self._kv)

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
        """Continues each prompt of the batch; arguments and defaults are those of T5X's method.

        Results are those of ``SpeculativeEncoderDecoderModel``; the tokens do not include prompts.
        Raises ``InputError`` for a batch without prompts, or a setting that loops do not support.
        """
        if "decoder_causal_attention" not in batch:
            raise InputError(
                "the batch has no decoder_causal_attention: give inputs and targets in "
                "task_feature_lengths"
            )
        tokens = jnp.asarray(batch["decoder_input_tokens"], jnp.int32)
        prompts = tokens * jnp.asarray(batch["decoder_causal_attention"], jnp.int32)
        check_prompts(prompts)
        check_numbers(1, num_decodes=num_decodes)
        lengths, max_decode_len = prompt_lengths(prompts), tokens.shape[1]
        settings = read_settings(self.decode_fn, decoder_params, rng, self._eos_id, max_decode_len)
        given = (prompts, prompts, settings, num_decodes, max_decode_len, lengths)
        result = self._sample(params, *given)
        without = jax.vmap(_without_prefix)(result.tokens, lengths)
        return pick_decodes(result.replace(tokens=without), return_all_decodes, self._statistics)


def _without_prefix(tokens: Int[Array, "decodes length"], length: Int[Array, ""]) -> Array:
    """Returns an input's tokens without the first ``length``, padded at the end."""
    positions = jnp.arange(tokens.shape[1])
    moved = jnp.roll(tokens, -length, axis=1)
    return jnp.where((positions < tokens.shape[1] - length)[None, :], moved, PAD_ID)


def check_pace(gamma: int, c: float | None, position: float) -> None:
    """Raises ``InputError`` unless all are finite numbers from 0 (c may be None), gamma whole."""
    if gamma == AUTO:
        raise InputError(
            f"gamma is {AUTO!r}: a T5X launch measures no times, give a number, and with it C (the "
            "time of a draft step in target steps, as in 0.05) to draft as many tokens as pay"
        )
    check_numbers(0, gamma=gamma)
    for name, value in {"c": 0.0 if c is None else c, "position": position}.items():
        if not (is_number(value) and 0 <= value < math.inf):
            raise InputError(f"{name} is {value!r}: give a number of at least 0, in target steps")
    if c is not None and not gamma:
        raise InputError(f"c is {c} and gamma 0, which drafts nothing: leave one of them out")
    if position and c is None:
        raise InputError(f"position is {position} without c: give c too")


def draft_of(model: Any) -> DraftSource:
    """Returns the draft of a launch's model; raises ``InputError`` if it has none."""
    draft = getattr(model, "_draft", None)
    if draft is None:
        raise no_draft(type(model))
    return draft


def no_draft(kind: type) -> InputError:
    """Makes the error of a launch whose model is of a class without a draft."""
    return InputError(
        f"the launch's model is a {kind.__name__} without a draft: give speculate.gin, or the "
        "run's file that includes it, after the model's file, and bind the model of infer, "
        "evaluate or save to %MODEL"
    )


def split_params(params: PyTree) -> tuple[PyTree, PyTree | None]:
    """Returns the target's parameters, and the draft's or None if it has none."""
    params = dict(flax.core.unfreeze(params))
    return params, params.pop(DRAFT, None)


def random_stream(
    settings: SampleSettings, verifier: Verifier, starts: Int[Array, "rows"], num_steps: int
) -> Array | Stream:
    """Returns a typed key for the loops or, for a coupled verifier, T5X's chain of keys."""
    rng = settings.rng
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)
    if verifier.coupled:
        if str(jax.random.key_impl(rng)) != THREEFRY:
            raise InputError(
                f"the key is of JAX's {jax.random.key_impl(rng)}: the coupled verifier follows "
                "T5X's threefry keys; leave set_hardware_rng_ops out, or take another verifier"
            )
        own_temperatures = settings.sampling.temperature.ndim == 1
        return t5x_stream(rng, starts, num_steps, same_for_rows=own_temperatures)
    return threefry(rng)


def pick_decodes(
    result: Decoded | BeamResult, return_all_decodes: bool, statistics: bool
) -> tuple[Array, dict[str, Array]]:
    """Returns tokens and scores of all decodes or of the last, the best; counts are of all."""
    counts = acceptance_aux(result, return_all_decodes) if statistics else {}
    if return_all_decodes:
        return result.tokens, {"scores": result.scores, **counts}
    return result.tokens[:, -1], {"scores": result.scores[:, -1], **counts}


def acceptance_aux(result: Decoded | BeamResult, of_each: bool) -> dict[str, Array]:
    """Returns the counts of acceptance, each ``[batch, ...]``, those of an input's decodes summed.

    Sampling has ``target_calls``, ``appended``, ``proposed``, ``accepted``, ``verified`` and
    ``beta_sum`` (``DecodeStats``) and, unless gamma is 0, ``accepted_by_position [..., gamma]`` and
    ``verified_by_position``; each is ``[batch, num_decodes, ...]`` if ``of_each``. A beam search
    has ``target_calls`` and ``steps``.
    """
    stats = result.stats
    if not isinstance(stats, DecodeStats):
        return {"target_calls": stats.target_calls, "steps": stats.steps}
    names = ("target_calls", "appended", "proposed", "accepted", "verified", "beta_sum")
    if stats.accepted_by_position.shape[-1]:
        names += ("accepted_by_position", "verified_by_position")
    counts = {name: getattr(stats, name) for name in names}
    return counts if of_each else {name: jnp.sum(v, axis=1) for name, v in counts.items()}
