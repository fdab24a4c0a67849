"""Measuring a tiny pair: the shapes of what comes back, never how fast it was."""

import dataclasses

import jax
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.tuning.auto import guarded, tuned
from spec_t5x.tuning.measuring import confirm, measure
from spec_t5x.tuning.options import TuningOptions
from spec_t5x.tuning.prediction import predict
from spec_t5x.tuning.store import Store

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["My sister", "Wir gehen morgen.", "a green bird"]
OPTIONS = GenerateOptions(max_decode_len=8, batch_size=2)
TUNING = TuningOptions(
    budget=0.1, num_inputs=3, max_gamma=2, probes=(2,), timed_gammas=(), resamples=20
)


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


@pytest.fixture(scope="module")
def kept() -> dict:
    return {}


@pytest.fixture
def measurement(generator, kept):
    """One for all tests, made within a test: there are the programs that the others share."""
    if not kept:
        heard = []
        kept["it"] = measure(
            generator,
            {"transformer": generator.draft},
            TEXTS,
            OPTIONS,
            batch_sizes=(2,),
            tuning=TUNING,
            report=lambda *heard_now: heard.append(heard_now),
        )
        assert [done for done, _, _ in heard] == [0, 1]
        assert {total for _, total, _ in heard} == {2}
    return kept["it"]


def test_all_is_measured_in_the_same_rounds(measurement, generator):
    times = measurement.times[2]
    rounds = len(times.plain)
    assert rounds >= 3
    assert times.widths == (1, 2, 3) and times.target.shape == (rounds, 3)
    assert times.inputs == ((0, 1), (2,))[: len(times.inputs)]
    assert times.compile_seconds > 0
    draft = times.drafts["transformer"]
    assert (draft.gammas, draft.probes) == ((1, 2), (2,))
    assert draft.propose.shape == (rounds, 2)
    assert (draft.decode > 0).all() and (draft.setup > 0).all()
    assert not measurement.varying and measurement.max_gamma == 2


def test_steps_and_iterations_are_those_of_the_loops(measurement, generator):
    times = measurement.times[2]
    batches = generator.batches(TEXTS, OPTIONS)[: len(times.inputs)]
    plain = [jax.device_get(generator.plain().decode(batch, OPTIONS)) for batch in batches]
    assert times.steps == sum(int(decoded.lengths.max()) for decoded in plain)
    options = dataclasses.replace(OPTIONS, gamma=2)
    drafted = [jax.device_get(generator.decode(batch, options)) for batch in batches]
    iterations = sum(int(decoded.stats.target_calls.max()) for decoded in drafted)
    assert times.drafts["transformer"].iterations.tolist() == [iterations]


def test_predictions_are_made_of_it(measurement):
    predictions = predict(measurement, TUNING)
    settings = [(p.draft, p.gamma) for p in predictions]
    assert settings == [(None, 0), ("transformer", 1), ("transformer", 2)]
    for p in predictions:
        assert 0 < p.low <= p.speed_up <= p.high < np.inf
        assert p.tokens_per_second > 0


def test_auto_ends_with_a_number_and_the_text_of_plain_decoding(generator, tmp_path):
    """Through all of it, with the real clock: whatever it chooses, greedy text stays."""
    options = dataclasses.replace(OPTIONS, gamma="auto")
    result = tuned(generator, TEXTS, options, tuning=TUNING, store=Store(tmp_path))
    assert result.options.gamma in (0, 1, 2)
    assert result.finding.num_inputs == 3 and len(list(tmp_path.iterdir())) == 1
    ours = [group[0].output for group in result.generator.generate(TEXTS, result.options)]
    plain = [group[0].output for group in generator.plain().generate(TEXTS, OPTIONS)]
    assert ours == plain


def test_a_guard_with_measured_costs_keeps_the_text(generator):
    options = dataclasses.replace(OPTIONS, gamma=2, guard=True)
    with pytest.raises(InputError, match="costs of the draft are not known"):
        next(generator.generate(TEXTS, options))
    safe = guarded(generator, TEXTS, options, tuning=TUNING)
    assert float(safe.guard.verification) >= 0
    ours = [group[0].output for group in safe.generate(TEXTS, options)]
    plain = [group[0].output for group in generator.plain().generate(TEXTS, OPTIONS)]
    assert ours == plain
    assert confirm(safe, TEXTS, options, budget=0.01) > 0
    # Another draft has other costs.
    assert safe.with_draft(generator.draft).guard is None


def test_what_cannot_be_measured_is_refused(generator):
    with pytest.raises(InputError, match="nothing to measure"):
        measure(generator, {}, TEXTS, OPTIONS, batch_sizes=(1,), tuning=TUNING)
    with pytest.raises(InputError, match="gamma is auto and was not measured"):
        next(generator.generate(TEXTS, dataclasses.replace(OPTIONS, gamma="auto")))
