"""The core's tests of models, for T5Gemmas."""

import numpy as np
import pytest

from spec_t5x.contrib.t5gemma import huggingface
from spec_t5x.drafts.transformer import TransformerDraft
from tests.contrib.t5gemma.toys import T5GEMMA2, tiny_t5gemma
from tests.loops.test_laws_against_transformers import THRESHOLD, VOCAB, decode_with, law, p_value
from tests.models import test_cache

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def gemmas_are_known(monkeypatch):
    """Adds T5Gemmas to the models of tests that know them by name."""
    monkeypatch.setitem(test_cache.MODELS, "t5gemma", lambda: tiny_t5gemma(0))
    monkeypatch.setitem(test_cache.MODELS, "t5gemma2", lambda: tiny_t5gemma(0, **T5GEMMA2))


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_cached_logits_are_the_teacher_forced_ones(name):
    test_cache.test_cached_logits_are_the_teacher_forced_ones_for_every_chunking(name)


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_rows_of_one_source_share_its_keys_and_values(name):
    test_cache.test_rows_of_one_source_share_its_keys_and_values(name)


@pytest.mark.parametrize("verifier_name", ["block", "tree"])
def test_texts_of_a_t5gemma_follow_the_law_of_transformers(tmp_path, verifier_name):
    """With a smaller model of the family."""
    # Of whose layers some see two tokens. Where padding saw padding alone, transformers has NaN.
    sizes = {"vocab_size": VOCAB, "window": 2, "encoder_reach": (3, 3), "global_rotary": (1e4, 1.0)}
    model, smaller = tiny_t5gemma(0, **sizes), tiny_t5gemma(1, **sizes, num_decoder_layers=1)
    decoded = decode_with(model, TransformerDraft(smaller), verifier_name)
    assert 0 < np.sum(decoded.stats.accepted) < np.sum(decoded.stats.proposed)
    assert p_value(law(model, tmp_path, huggingface), decoded) > THRESHOLD
