"""The encoder-decoder of T5X that decodes speculatively and keeps T5X's contract."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import jax.numpy as jnp
from t5x import models

from spec_t5x.beams.hypotheses import BeamResult
from spec_t5x.beams.search import beam_search
from spec_t5x.beams.speculative import speculative_beam_search
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.t5x_plugin.decode_settings import BeamSettings, check_prompts, read_settings
from spec_t5x.t5x_plugin.networks import t5_config
from spec_t5x.t5x_plugin.speculative_model import (
    SpeculativeModel,
    pick_decodes,
    split_params,
)
from spec_t5x.types import Array, Int, PyTree


class SpeculativeEncoderDecoderModel(SpeculativeModel, models.EncoderDecoderModel):
    """``t5x.models.EncoderDecoderModel`` with a draft.

    ``speculation.speculate`` makes one of a stock model.
    """

    def _make_network(self) -> Transformer:
        return Transformer(t5_config(self.module))

    def _target(self, params: PyTree) -> T5Model:
        return T5Model(params=params, module=self._network)

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
        if self._gamma == 0:
            return beam_search(target, inputs, prompts, **common)
        if not isinstance(draft, TransformerDraft):
            raise InputError(
                f"decode_fn is beam_search and the draft a {type(draft).__name__}: search with "
                "a ModelDraft, or with gamma 0"
            )
        return speculative_beam_search(
            target, draft.model, inputs, prompts, gamma=self._gamma, **common
        )
