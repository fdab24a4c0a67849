"""The gin files that a launch includes, bound as T5X binds them."""

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import gin
import seqio

from spec_t5x.models.decoder_only import DecoderOnlyConfig
from spec_t5x.models.sizes import size
from spec_t5x.t5x_plugin.networks import t5_config
from spec_t5x.t5x_plugin.speculative_model import SpeculativeDecoderOnlyModel

REPOSITORY = Path(__file__).parents[2]

DECODER_ONLY_LAUNCH = """
from __gin__ import dynamic_registration
import seqio
from spec_t5x.models import decoder_only
from t5x import models
from t5x.examples.decoder_only import network

models.DecoderOnlyModel:
  module = @network.DecoderWrapper()
  vocabulary = @seqio.ByteVocabulary()
  optimizer_def = None
network.DecoderWrapper.config = @network.TransformerConfig()
network.TransformerConfig:
  vocab_size = 384
  num_layers = 2
decoder_only.DecoderOnlyConfig:
  vocab_size = 384
  num_layers = 1
"""


def test_decoder_only_gin_makes_the_twin():
    gin.clear_config()
    try:
        for name in ("speculate", "decoder_only"):
            path = REPOSITORY / "gin_configs" / "t5x" / f"{name}.gin"
            gin.parse_config(path.read_text())
        gin.parse_config(DECODER_ONLY_LAUNCH)
        model = gin.query_parameter("%MODEL").scoped_configurable_fn()
        draft = gin.query_parameter("%DRAFT").scoped_configurable_fn()
    finally:
        gin.clear_config()
    assert isinstance(model, SpeculativeDecoderOnlyModel)
    assert isinstance(draft.config, DecoderOnlyConfig)
    assert (draft.config.num_layers, model._network.config.num_layers) == (1, 2)


SIZED_LAUNCH = """
from __gin__ import dynamic_registration
import seqio
DROPOUT_RATE = 0.1
VOCABULARY = @seqio.ByteVocabulary()
"""


def test_a_model_of_a_published_size():
    gin.clear_config()
    try:
        gin.parse_config((REPOSITORY / "gin_configs" / "t5x" / "sized_model.gin").read_text())
        gin.parse_config(SIZED_LAUNCH)
        gin.parse_config(["MODEL_SIZE = 'byt5_small'", "VOCABULARY_FILE = None"])
        model = gin.query_parameter("%MODEL").scoped_configurable_fn()
    finally:
        gin.clear_config()
    assert isinstance(model.output_vocabulary, seqio.ByteVocabulary)
    expected = dataclasses.replace(size("byt5_small"), dropout_rate=0.1, dtype="bfloat16")
    assert t5_config(model.module) == expected
