"""Synthetic acceptance: verdicts with the given rate, times without text."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.cli.main import main
from spec_t5x.errors import InputError
from spec_t5x.experiments import paper_tables
from spec_t5x.experiments import synthetic_acceptance as synthetic
from spec_t5x.experiments.synthetic_acceptance import SyntheticOptions, SyntheticVerifier, Timing
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


@pytest.fixture(scope="module")
def tiny_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.SIZES, "tiny_target", TINY)
        draft = dataclasses.replace(TINY, emb_dim=8, num_decoder_layers=1)
        patch.setitem(sizes.SIZES, "tiny_draft", draft)
        yield


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
def timing(tiny_sizes, quick_compilation) -> Timing:
    options = SyntheticOptions(
        target="tiny_target",
        drafts=("tiny_draft",),
        alpha=0.7,
        gamma=3,
        source_len=8,
        decode_len=120,
        repeats=4,
        step_repeats=2,
    )
    seen = []
    (timing,) = synthetic.run(options, lambda *told: seen.append(told))
    assert seen == [(0, 1, "tiny_draft, temperature 0, gamma 3")]
    return timing


def test_lengths_are_given_and_calls_follow_equation_1(timing):
    assert timing.num_tokens == 120
    assert len(timing.plain_seconds) == len(timing.speculative_seconds) == 4
    # 480 tokens take about 190 calls, whose number scatters by a few.
    assert timing.block_efficiency == pytest.approx(formulas.expected_tokens(0.7, 3), rel=0.15)
    # About 400 decided positions.
    assert timing.acceptance_rate == pytest.approx(0.7, abs=5 * (0.7 * 0.3 / 400) ** 0.5)


def test_what_comes_back_is_time_and_counts_alone(timing):
    def leaves(value):
        if isinstance(value, dict):
            for part in value.values():
                yield from leaves(part)
        elif isinstance(value, list):
            for part in value:
                yield from leaves(part)
        else:
            yield value

    values = timing.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert {leaf for leaf in leaves(values) if isinstance(leaf, str)} == {"tiny_draft"}
    # No list but the repeats' seconds and the least and largest ratio: no room for tokens.
    assert {len(v) for v in values.values() if isinstance(v, list)} == {2, 4}
    assert all(isinstance(x, float) for v in values.values() if isinstance(v, list) for x in v)


def test_speed_ups_and_expectations_are_of_these_figures(timing):
    made = dataclasses.replace(
        timing,
        plain_seconds=[3.0, 2.0, 4.0],
        speculative_seconds=[1.0, 2.0, 1.5],
        plain_setup_seconds=[1.0, 1.0, 1.0],
        speculative_setup_seconds=[0.5, 0.5, 0.5],
        step_times=dataclasses.replace(timing.step_times, target=2.0, draft=0.2, verification=3.0),
    )
    assert made.speed_up == 2.0
    assert made.speed_up_range == (1.0, 3.0)
    assert made.loop_speed_up == 2.0
    tokens = 1 + 0.7 + 0.49 + 0.343
    assert made.expected == pytest.approx(tokens / 1.3)
    assert made.expected_with_verification == pytest.approx(tokens / 1.8)
    (line,) = [line for line in synthetic.table([made]).splitlines() if "tiny_draft" in line]
    assert "| 2.00 | 1.00–3.00 | 2.00 |" in line


def test_weights_are_made_in_the_type_asked_for(tiny_sizes, unchecked):
    for dtype in ("float32", "bfloat16"):
        model = synthetic.random_model(TINY, dtype, seed=0)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {dtype}
        score = jax.jit(lambda model: model.score(model.prefill(SOURCE, 2), SOURCE[:, :2])[0])
        logits = score(model)
        assert bool(jnp.all(jnp.isfinite(logits)))
        assert float(jnp.std(logits)) > 0


def test_rows_are_the_papers_for_the_drafts_asked_for():
    small = SyntheticOptions(drafts=("t5_1_1_small",)).rows()
    assert [row.paper for row in small] == [r for r in paper_tables.TABLE_2 if r.draft == "small"]
    assert [row.paper for row in SyntheticOptions().rows()] == list(paper_tables.TABLE_2)
    assert all((r.alpha, r.gamma) == (r.paper.alpha, r.paper.gamma) for r in small)


def test_memory_is_counted_from_shapes_and_refused_in_one_line(tiny_sizes, unchecked):
    options = SyntheticOptions(target="tiny_target", drafts=("tiny_draft",), alpha=0.5)
    target = synthetic.random_model(TINY, "float32", seed=0)
    needed = synthetic.bytes_needed(options)
    assert needed > sum(leaf.nbytes for leaf in jax.tree.leaves(target))
    synthetic.check_memory(options, available=needed)
    with pytest.raises(InputError, match=r"takes 0\.0 GiB and this device has 0\.0 free") as error:
        synthetic.check_memory(options, available=needed - 1)
    assert "\n" not in str(error.value)
    # Compiled for a TPU-v4, weights and caches of the same loops come to 20.9 GiB.
    paper = SyntheticOptions(drafts=("t5_1_1_small",), dtype="bfloat16")
    assert 20.9 < synthetic.bytes_needed(paper) / 2**30 < 23


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "t5_9"}, "no T5 size is called 't5_9'"),
        ({"drafts": ("byt5_small",)}, "has 384 tokens"),
        ({"drafts": ("t5_1_0_small",)}, "Table 2 has t5_1_1_small"),
        ({"drafts": ()}, "Table 2 has t5_1_1_small"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"repeats": 0}, "repeats is 0"),
        ({"temperature": -1.0, "alpha": 0.5}, "temperature is -1"),
    ],
)
def test_mistakes_are_refused_before_anything_is_made(options, message):
    with pytest.raises(InputError, match=message):
        SyntheticOptions(**options)


def test_the_command_prints_a_table_and_keeps_the_figures(
    tiny_sizes, timing, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(synthetic, "run", lambda options, report: iter([timing]))
    path = tmp_path / "figures.json"
    flags = ["--target", "tiny_target", "--draft", "tiny_draft", "--alpha", "0.7"]
    assert main(["synthetic", *flags, "--json", str(path)]) == 0
    assert "| tiny_draft | 0 | 3 | 0.70 |" in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert kept["rows"] == [timing.to_dict()]
    assert kept["options"]["drafts"] == ["tiny_draft"]
    assert main(["synthetic", "--draft", "byt5_small"]) == 2
    assert capsys.readouterr().err.startswith("spec-t5x: error: draft byt5_small has 384 tokens")
