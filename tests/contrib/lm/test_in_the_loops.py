"""The core's tests of targets and models, for a GPT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.lm.gpt import GPT
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.labs.benchmark.text_scores import score_texts
from spec_t5x.labs.testing.laws import check_target
from spec_t5x.labs.theory import formulas
from spec_t5x.sampling.distributions import sampling
from tests.contrib.lm.toys import tiny_gpt
from tests.drafts import test_self_draft
from tests.labs.benchmark.test_text_scores import (
    KEYS,
    LENGTH,
    PROMPT_LENGTHS,
    PROMPTS,
    generated,
)
from tests.labs.testing.test_laws import INPUTS
from tests.loops.test_refill import GROUPS, check, in_a_batch, in_slots
from tests.models import test_cache, test_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def gpt_is_known(monkeypatch):
    """Adds a GPT to the models of tests that know them by name."""
    monkeypatch.setitem(test_cache.MODELS, "gpt", lambda: tiny_gpt(0))


def test_it_is_a_target():
    check_target(tiny_gpt(0), INPUTS % 4)


def test_cached_logits_are_the_teacher_forced_ones():
    test_cache.test_cached_logits_are_the_teacher_forced_ones("gpt")


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_bfloat16_are_float32(tied):
    model = tiny_gpt(0, logits_via_embedding=tied)
    test_layers.test_logits_of_bfloat16_are_float32_without_a_copy_of_the_table(model, GPT.logits)


def test_nearly_all_drafts_of_rounded_weights_are_accepted():
    test_self_draft.test_nearly_all_drafts_of_rounded_weights_are_accepted(tiny_gpt, None)


def test_a_decoder_alone_keeps_its_prompts():
    model, proposer = tiny_gpt(0), CopyDraft(tiny_gpt(0).vocab_size)
    options = {"model": model, "temperature": 1.0}
    check(in_slots(proposer, GROUPS, **options).found, in_a_batch(proposer, **options))


def test_a_decoder_alone_goes_on_with_its_prompts():
    """The expectation is the network's own pass over whole texts, as in training."""
    target, network = (tiny_gpt(seed, num_layers=1, max_length=LENGTH) for seed in (0, 1))
    # The last positions there are: what is fed beyond them is never read.
    inputs, settings = jnp.ones((3, 1), jnp.int32), sampling(1.0)
    drafts = {"network": TransformerDraft(network)}
    options = {"max_decode_len": LENGTH, "eos_id": -1}
    scores = score_texts(target, drafts, inputs, PROMPTS, KEYS, settings, **options)
    whole = jnp.pad(generated(target, inputs, PROMPTS, settings)[:, :-1], ((0, 0), (1, 0)))
    p, q = (
        jax.nn.softmax(m.module.apply({"params": m.params}, whole, enable_dropout=False))
        for m in (target, network)
    )
    exact = formulas.beta(p, q)
    for row, start in enumerate(PROMPT_LENGTHS):
        found = np.asarray(scores.betas["network"][0, row, : LENGTH - start])
        np.testing.assert_allclose(found, exact[row, start:], atol=1e-4)
