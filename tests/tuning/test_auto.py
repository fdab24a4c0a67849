"""``gamma = "auto"``: what is chosen from made-up measurements, remembered and announced."""

import dataclasses

import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.tuning.auto import guarded, tuned
from spec_t5x.tuning.options import TuningOptions
from spec_t5x.tuning.store import Store
from tests.tuning.figures import LARGEST, made_up, random_texts, rows_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["My sister", "Wir gehen morgen.", "Der alte Tisch", "a green bird", "It is wet."] * 2
AUTO = GenerateOptions(gamma="auto", max_decode_len=16, batch_size=2)
TUNING = TuningOptions(resamples=40)
PERFECT = (rows_of(["1" * 64] * 9), 0.0)
HOPELESS = (rows_of(["0" * 64] * 9), 0.1)
GOOD = (rows_of(random_texts(0.8, num=9)), 0.1)


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "tuning")


class Bench:
    """Stands for the device: measurements made up, and calls noted."""

    def __init__(self, figures, factor: float = 1.5):
        self.figures, self.factor = figures, factor
        self.measured, self.confirmed, self.said = [], [], []

    def tuned(self, generator, texts=TEXTS, options=AUTO, **changes):
        kwargs = {"tuning": TUNING, "announce": self.said.append, **changes}
        return tuned(
            generator, texts, options, measure=self._measure, confirm=self._confirm, **kwargs
        )

    def guarded(self, generator, options, texts=TEXTS, **changes):
        kwargs = {"tuning": TUNING, "announce": self.said.append, **changes}
        return guarded(generator, texts, options, measure=self._measure, **kwargs)

    def _measure(self, generator, drafts, texts, options, *, batch_sizes, **kwargs):
        self.measured.append((list(texts), kwargs["tuning"]))
        ((name, _),) = drafts.items()
        return made_up({name: self.figures}, batch_sizes=batch_sizes, setup=1.0, draft_setup=0.5)

    def _confirm(self, generator, texts, options, **kwargs):
        self.confirmed.append((generator, options))
        return self.factor


def test_a_hopeless_draft_is_left_out(generator):
    bench = Bench(HOPELESS)
    result = bench.tuned(generator)
    assert (result.options.gamma, result.options.guard) == (0, False)
    assert result.generator.draft is None and not bench.confirmed
    assert "gamma 0, plain decoding" in result.line and "is not sure to be faster" in result.line
    assert bench.said == ["measuring which gamma is best here, on 10 of the inputs"]


def test_a_perfect_draft_that_costs_nothing_drafts_all_it_may(generator):
    result = Bench(PERFECT).tuned(generator)
    assert (result.options.gamma, result.options.guard) == (LARGEST, True)
    assert f"gamma {LARGEST}: " in result.line and "1.50 measured, on 9 inputs" in result.line
    assert result.generator.draft is generator.draft


def test_what_was_chosen_has_a_guard_with_the_measured_costs(generator):
    result = Bench(GOOD).tuned(generator)
    gamma = result.options.gamma
    assert 2 <= gamma <= 8
    guard = result.generator.guard
    np.testing.assert_allclose(
        [guard.draft_step, guard.verification, guard.prefill], [0.1, 1.0, 0.5], rtol=1e-5
    )
    without = Bench(GOOD).tuned(generator, with_guard=False)
    assert (without.options.gamma, without.options.guard) == (gamma, False)
    assert without.generator.guard is None


def test_what_measuring_does_not_confirm_is_not_chosen(generator):
    bench = Bench(GOOD, factor=0.99)
    result = bench.tuned(generator)
    assert result.options.gamma == 0 and result.generator.draft is None
    assert "0.99 measured" in result.line
    ((tried, options),) = bench.confirmed
    # As it would have been decoded with.
    assert options.gamma == result.finding.best_gamma > 0
    assert options.guard and tried.guard is not None


def test_it_is_measured_once_for_each_setting(generator, store):
    bench = Bench(GOOD)
    first = bench.tuned(generator, store=store)
    again = bench.tuned(generator, TEXTS[:1], store=store)
    assert len(bench.measured) == 1 and len(bench.confirmed) == 1
    assert again.remembered and again.options == first.options
    assert again.generator.guard.draft_step == first.generator.guard.draft_step
    assert "from an earlier run" in again.line and "from an earlier run" not in first.line
    for options in (
        dataclasses.replace(AUTO, temperature=1.0),
        dataclasses.replace(AUTO, batch_size=1),
    ):
        bench.tuned(generator, options=options, store=store)
    bench.tuned(generator, store=store, with_guard=False)
    assert len(bench.measured) == 4
    # A seed changes nothing.
    bench.tuned(generator, options=dataclasses.replace(AUTO, seed=5), store=store)
    assert len(bench.measured) == 4


def test_what_one_text_said_is_not_for_ever(generator, store):
    one = (rows_of(["1" * 64]), 0.0)
    bench = Bench(one)
    bench.tuned(generator, TEXTS[:1], store=store)
    bench.tuned(generator, TEXTS[:3], store=store)
    assert len(bench.measured) == 1
    bench.tuned(generator, TEXTS[:4], store=store)
    assert len(bench.measured) == 2


def test_only_the_first_inputs_are_measured_on(generator):
    bench = Bench(GOOD)
    bench.tuned(generator, tuning=dataclasses.replace(TUNING, num_inputs=3))
    assert bench.measured[0][0] == TEXTS[:3]


def test_what_cannot_be_remembered_is_said(generator, tmp_path):
    (tmp_path / "file").touch()
    result = Bench(GOOD).tuned(generator, store=Store(tmp_path / "file" / "tuning"))
    assert "not remembered" in result.line and "\n" not in result.line


def test_without_draft_or_input_there_is_nothing_to_measure(generator):
    bench = Bench(GOOD)
    for which, texts in ((generator.plain(), TEXTS), (generator, [])):
        result = bench.tuned(which, texts)
        assert (result.options.gamma, result.finding) == (0, None)
        assert "nothing to measure" in result.line
    assert not bench.measured


def test_the_costs_of_a_given_gamma_are_measured_for_its_guard(generator, store):
    bench = Bench(GOOD)
    options = dataclasses.replace(AUTO, gamma=6, guard=True)
    result = bench.guarded(generator, options, store=store)
    np.testing.assert_allclose(
        [result.guard.draft_step, result.guard.verification, result.guard.prefill],
        [0.1, 1.0, 0.5],
        rtol=1e-5,
    )
    ((_, tuning),) = bench.measured
    assert (tuning.max_gamma, tuning.probes) == (6, (6,))
    again = bench.guarded(generator, options, store=store)
    assert len(bench.measured) == 1 and again.guard.prefill == result.guard.prefill
    bench.guarded(generator, dataclasses.replace(options, gamma=5), store=store)
    assert len(bench.measured) == 2


def test_a_guard_without_drafts_costs_no_measurement(generator):
    bench = Bench(GOOD)
    for which, gamma in ((generator.plain(), 3), (generator, 0)):
        options = dataclasses.replace(AUTO, gamma=gamma, guard=True)
        assert bench.guarded(which, options).guard is None
    assert not bench.measured
    with pytest.raises(InputError, match="no input to measure"):
        bench.guarded(generator, dataclasses.replace(AUTO, gamma=3), texts=[])


def test_the_two_are_not_mixed_up(generator):
    with pytest.raises(InputError, match="gamma is 3: only auto is tuned"):
        tuned(generator, TEXTS, dataclasses.replace(AUTO, gamma=3))
    with pytest.raises(InputError, match="use tuned"):
        guarded(generator, TEXTS, AUTO)
