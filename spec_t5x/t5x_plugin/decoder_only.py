"""The decoder-only twin of ``encoder_decoder``."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
from t5x import models

from spec_t5x.errors import InputError
from spec_t5x.models.decoder_only import DecoderOnlyModel, DecoderOnlyTransformer
from spec_t5x.t5x_plugin.decode_settings import BeamSettings, check_prompts, read_settings
from spec_t5x.t5x_plugin.networks import decoder_only_config
from spec_t5x.t5x_plugin.speculative_model import (
    SpeculativeModel,
    pick_decodes,
    split_params,
)
from spec_t5x.types import PAD_ID, Array, PyTree


class SpeculativeDecoderOnlyModel(SpeculativeModel, models.DecoderOnlyModel):
    """``t5x.models.DecoderOnlyModel`` with a draft, causal or with a prefix.

    ``speculation.speculate`` makes one of a stock model.
    """

    def _make_network(self) -> DecoderOnlyTransformer:
        return DecoderOnlyTransformer(decoder_only_config(self.module))

    def _target(self, params: PyTree) -> DecoderOnlyModel:
        return DecoderOnlyModel(
            params=params, module=self._network, prefix_lm=self._inputs_bidirectional_attention
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
        if isinstance(settings, BeamSettings):
            raise InputError(
                "decode_fn is beam_search: decode a decoder-only model with temperature_sample"
            )
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
