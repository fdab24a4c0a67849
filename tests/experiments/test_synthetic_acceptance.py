"""Synthetic acceptance: verdicts with the given rate, times without text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments import synthetic_acceptance as synthetic
from spec_t5x.experiments.synthetic_acceptance import SyntheticVerifier
from spec_t5x.generation import GenerateOptions
from spec_t5x.interfaces import Proposal
from spec_t5x.loops.outputs import row_keys
from spec_t5x.models import sizes
from spec_t5x.models.t5 import T5Config
from spec_t5x.sampling.distributions import sampling, standardize
from spec_t5x.sampling.draws import RowStream
from spec_t5x.theory import formulas
from spec_t5x.verifiers import TokenVerifier

ROWS, GAMMA, VOCAB = 4000, 4, 8
SOURCE = np.array([[5, 6, 7]], np.int32)
TINY = T5Config(
    vocab_size=64,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=2,
    mlp_activations=("gelu", "linear"),
    logits_via_embedding=False,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def arguments(counts=GAMMA, temperature=1.0):
    """What a verifier is called with: ``ROWS`` rows of random logits."""
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
def test_drafts_stand_with_probability_alpha(alpha, temperature):
    """Whatever they are; the law of the count is that of i.i.d. acceptances."""
    verdict = verify(SyntheticVerifier(alpha=alpha), *arguments(temperature=temperature))
    counts = np.bincount(np.asarray(verdict.num_accepted), minlength=GAMMA + 1)
    law = np.array([alpha**i * (1 - alpha) for i in range(GAMMA)] + [alpha**GAMMA])
    # Five standard deviations of a count of ROWS draws.
    assert np.all(np.abs(counts - ROWS * law) < 5 * np.sqrt(ROWS * law * (1 - law)))


@pytest.mark.parametrize(("alpha", "counts", "expected"), [(0.0, 4, 0), (1.0, 4, 4), (1.0, 2, 2)])
def test_only_proposed_drafts_stand(alpha, counts, expected):
    verdict = verify(SyntheticVerifier(alpha=alpha), *arguments(counts))
    assert np.all(verdict.num_accepted == expected)


def test_the_token_is_of_the_real_verdict_whose_time_is_measured():
    real = verify(TokenVerifier(), *arguments())
    drawn = verify(SyntheticVerifier(alpha=0.5), *arguments())
    np.testing.assert_array_equal(drawn.next_token, real.next_token)
    assert np.any(drawn.num_accepted != real.num_accepted)


@pytest.fixture(scope="module")
def models(quick_compilation):
    draft = dataclasses.replace(TINY, emb_dim=8, num_decoder_layers=1)
    return synthetic.random_model(TINY, "float32", 0), synthetic.random_model(draft, "float32", 1)


@pytest.fixture(scope="module")
def comparison(models):
    target, draft = models
    options = GenerateOptions(gamma=3, max_decode_len=120, verifier="token")
    return synthetic.compare_drawn(
        target,
        TransformerDraft(draft),
        options,
        alpha=0.7,
        source_len=8,
        repeats=4,
        step_repeats=2,
    )


def test_lengths_are_given_and_calls_follow_equation_1(comparison):
    assert comparison.plain_tokens == comparison.speculative_tokens == 120
    assert len(comparison.plain_seconds) == len(comparison.speculative_seconds) == 4
    # 480 tokens take about 190 calls, whose number scatters by a few.
    assert comparison.block_efficiency == pytest.approx(formulas.expected_tokens(0.7, 3), rel=0.15)
    # About 400 decided positions.
    assert comparison.acceptance_rate == pytest.approx(0.7, abs=5 * (0.7 * 0.3 / 400) ** 0.5)
    # Time and counts alone: not a token.
    assert comparison.outputs == comparison.divergences == [] and comparison.identical is None


def test_speed_ups_and_expectations_are_of_these_figures(comparison):
    times = dataclasses.replace(comparison.step_times, target=2.0, draft=0.2, verification=3.0)
    made = dataclasses.replace(
        comparison,
        plain_seconds=[3.0, 2.0, 4.0],
        speculative_seconds=[1.0, 2.0, 1.5],
        plain_setup_seconds=[1.0, 1.0, 1.0],
        speculative_setup_seconds=[0.5, 0.5, 0.5],
        step_times=times,
    )
    assert made.speed_up == 2.0
    assert made.speed_up_range == (1.0, 3.0)
    assert made.loop_speed_up == 2.0
    tokens = 1 + 0.7 + 0.49 + 0.343
    assert made.predicted == pytest.approx(tokens / 1.3)
    assert made.predicted_with_verification == pytest.approx(tokens / 1.8)
    # A long text of one row takes what the theorem says, a batch its slowest row's time.
    alone = times.batch_speed_up(0.7, 3, rows=1, length=4096)
    assert alone == pytest.approx(tokens / 1.8, rel=2e-3)
    assert times.batch_speed_up(0.7, 3, rows=32, length=4096) < alone


def test_weights_are_made_in_the_type_asked_for(unchecked):
    model = synthetic.random_model(TINY, "bfloat16", seed=0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    logits = jax.jit(lambda model: model.score(model.prefill(SOURCE, 2), SOURCE[:, :2])[0])(model)
    assert bool(jnp.all(jnp.isfinite(logits))) and float(jnp.std(logits)) > 0


def test_memory_is_counted_from_shapes_and_refused_in_one_line(models, monkeypatch, unchecked):
    monkeypatch.setitem(sizes.SIZES, "tiny", TINY)
    needed = synthetic.bytes_needed("tiny", ["tiny"], "float32")
    assert needed > 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(models[0].params))
    synthetic.check_fits("tiny", ["tiny"], "float32", available=needed)
    with pytest.raises(InputError, match=r"takes 0\.0 GiB and this device has 0\.0 free") as error:
        synthetic.check_fits("tiny", ["tiny"], "float32", available=needed - 1)
    assert "\n" not in str(error.value)
    # Compiled for a TPU-v4, weights and caches of the same loops come to 20.9 GiB.
    needed = synthetic.bytes_needed("t5_1_1_xxl", ["t5_1_1_small"], "bfloat16")
    assert 20.9 < needed / 2**30 < 23
