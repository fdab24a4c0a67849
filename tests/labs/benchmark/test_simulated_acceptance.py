"""Verdicts with the given rate, and models with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Proposal
from spec_t5x.labs.benchmark import random_models
from spec_t5x.labs.benchmark.simulated_acceptance import SimulatedVerifier
from spec_t5x.loops.outputs import row_keys
from spec_t5x.models.weights import Rounded
from spec_t5x.sampling.distributions import sampling, standardize
from spec_t5x.sampling.draws import RowStream
from spec_t5x.verifiers import TokenVerifier
from tests.labs.training.toys import toy_config

ROWS, GAMMA, VOCAB = 4000, 4, 8
SOURCE = np.array([[5, 6, 7]], np.int32)
UNTIED = {"mlp_activations": ("gelu", "linear"), "logits_via_embedding": False}
TINY = toy_config(64, 16, num_decoder_layers=2, **UNTIED)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def arguments(counts=GAMMA, temperature=1.0):
    """Returns a verifier's arguments: ``ROWS`` rows of random logits."""
    settings = sampling(temperature)
    logits = jax.random.normal(jax.random.key(1), (ROWS, GAMMA + 1, VOCAB))
    tokens = jax.random.randint(jax.random.key(2), (ROWS, GAMMA), 0, VOCAB)
    proposal = Proposal(
        tokens=tokens,
        probs=jnp.full((ROWS, GAMMA, VOCAB), 1 / VOCAB),
        counts=jnp.full(ROWS, counts, jnp.int32),
    )
    stream = RowStream(row_keys(jax.random.key(0), ROWS))
    lengths = jnp.full(ROWS, 3, jnp.int32)
    return stream, lengths, proposal, logits, standardize(logits, settings), settings


def verify(verifier, *given):
    return jax.jit(lambda given: verifier(*given))(given)


@pytest.mark.parametrize(("alpha", "temperature"), [(0.3, 1.0), (0.8, 0.0)])
def test_drafts_are_accepted_with_probability_alpha(alpha, temperature):
    """The law of the count is that of i.i.d. acceptances."""
    verdict = verify(SimulatedVerifier(alpha=alpha), *arguments(temperature=temperature))
    counts = np.bincount(np.asarray(verdict.num_accepted), minlength=GAMMA + 1)
    law = np.array([alpha**i * (1 - alpha) for i in range(GAMMA)] + [alpha**GAMMA])
    # Five standard deviations of a count of ROWS draws.
    assert np.all(np.abs(counts - ROWS * law) < 5 * np.sqrt(ROWS * law * (1 - law)))


def test_the_token_is_of_the_real_verdict_and_only_proposed_drafts_are_accepted():
    verdict = verify(SimulatedVerifier(alpha=1.0), *arguments(counts=2))
    assert np.all(verdict.num_accepted == 2)
    real = verify(TokenVerifier(), *arguments())
    drawn = verify(SimulatedVerifier(alpha=0.5), *arguments())
    np.testing.assert_array_equal(drawn.next_token, real.next_token)
    assert np.any(drawn.num_accepted != real.num_accepted)


def test_weights_are_made_in_the_type_asked_for(unchecked):
    model = random_models.random_model(TINY, "bfloat16", seed=0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    logits = jax.jit(lambda model: model.score(model.prefill(SOURCE, 2), SOURCE[:, :2])[0])(model)
    assert bool(jnp.all(jnp.isfinite(logits))) and float(jnp.std(logits)) > 0


def test_the_precision_that_was_asked_for_is_random_weights_too(unchecked):
    model = random_models.random_model(TINY, "bfloat16", 0, "int8", "int8")
    assert isinstance(model.weights["decoder"]["layers_0"]["mlp"]["wo"]["kernel"], Rounded)
    assert model.prefill(SOURCE, 2).layers[0].cross_keys.values.dtype == jnp.int8


def test_memory_is_counted_from_shapes_and_refused_in_one_line(monkeypatch, unchecked):
    """Weights and caches of the same loops, compiled for a TPU-v4, take 20.9 GiB."""
    sizes = ("t5_1_1_xxl", ["t5_1_1_small"], "bfloat16")
    for free in (None, 23 * 2**30):
        monkeypatch.setattr(random_models, "free_memory", lambda free=free: free)
        random_models.check_memory(*sizes)
    monkeypatch.setattr(random_models, "free_memory", lambda: round(20.9 * 2**30))
    with pytest.raises(InputError, match=r"takes 23\.0 GiB and this device has 20\.9 free"):
        random_models.check_memory(*sizes)
