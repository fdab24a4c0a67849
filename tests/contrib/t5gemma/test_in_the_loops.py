"""The core's tests of models, for T5Gemmas."""

import json

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from spec_t5x.contrib.t5gemma import huggingface
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.labs.testing.laws import check_target
from spec_t5x.models.seq2seq import T5Model
from tests.contrib.t5gemma.toys import T5GEMMA2, tiny_t5gemma
from tests.loops.test_laws_against_transformers import (
    THRESHOLD,
    VOCAB,
    decode_with,
    law_of,
    p_value,
)
from tests.models import test_cache

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def gemmas_are_known(monkeypatch):
    """Adds T5Gemmas to the models of tests that know them by name."""
    monkeypatch.setitem(test_cache.MODELS, "t5gemma", lambda: tiny_t5gemma(0))
    monkeypatch.setitem(test_cache.MODELS, "t5gemma2", lambda: tiny_t5gemma(0, **T5GEMMA2))


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_calls_agree_with_one_another_and_with_the_training_path(name):
    test_cache.test_its_calls_agree_with_one_another(name)
    test_cache.test_cached_logits_are_the_teacher_forced_ones(name)


@pytest.mark.parametrize("sizes", [{}, T5GEMMA2], ids=["t5gemma", "t5gemma2"])
def test_calls_with_the_source_in_int8_agree_with_one_another(sizes):
    check_target(tiny_t5gemma(0, **sizes).with_kv("int8"), test_cache.SOURCES)


def saved(directory, layers, seed):
    """Saves a model of transformers, and returns ours of its weights and ids."""
    theirs = pytest.importorskip("tests.contrib.t5gemma.torch_t5gemma").make_t5gemma
    model = theirs("t5gemma", VOCAB, layers, seed)
    # Wide enough to tell a wrong temperature.
    model.config.decoder.final_logit_softcapping = 6.0
    model.config.encoder.final_logit_softcapping = 6.0
    model.save_pretrained(directory)
    values = json.loads((directory / "config.json").read_text())
    config = huggingface._read_config(values, directory)
    tensors, names = load_file(directory / "model.safetensors"), huggingface.tensor_names(config)
    params = {
        path: tensors[name].T if flip else tensors[name] for path, (name, flip) in names.items()
    }
    return T5Model.create(unflatten_dict(params, sep="/"), config)


@pytest.mark.parametrize("verifier_name", ["block", "tree"])
def test_texts_of_a_t5gemma_follow_the_law_of_transformers(tmp_path, verifier_name):
    """A smaller model of the family drafts."""
    model, smaller = saved(tmp_path / "a", 2, 0), saved(tmp_path / "b", 1, 1)
    decoded = decode_with(model, TransformerDraft(smaller), verifier_name)
    assert 0 < np.sum(decoded.stats.accepted) < np.sum(decoded.stats.proposed)
    assert p_value(law_of(tmp_path / "a"), decoded) > THRESHOLD
