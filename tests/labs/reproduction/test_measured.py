"""Tables 2, 3 and 5, Figures 1 and 5: from made-up results, and measured with a tiny pair."""

import dataclasses
import json
import types

import pytest

from spec_t5x.checkpoints import digests
from spec_t5x.generation import Generator
from spec_t5x.labs.benchmark import paper_tables, traces
from spec_t5x.labs.benchmark.step_times import StepTimes
from spec_t5x.labs.reproduction import acceptance_rates, compiled_steps, decodes, pairs, speed_ups
from spec_t5x.labs.reproduction.acceptance_rates import TABLE_3, TABLE_5
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from tests.labs.benchmark.test_sweep import made_up  # noqa: F401

QUICK = ReproduceOptions(quick=True)


@pytest.fixture
def libtpu(monkeypatch):
    """Provides ``libtpu(there)``, which sets whether it is installed."""

    def install(there):
        reason = None if there else "libtpu is not installed"
        monkeypatch.setattr(compiled_steps.chips, "no_compiler", lambda: reason)

    return install


# From made-up results


def test_predictions_are_in_the_papers_rows(content, libtpu):
    """All rows are there, also with nothing measured."""
    libtpu(True)
    predicted = {"key": ["CNN/DM", "small", 1.0], "c": 0.01, "verification_cost": 1.02}
    found = {"compiled/table2": {"rows": [predicted | {"speed_up": 1.9}]}}
    (table,) = content(speed_ups.TABLE_2, found)
    at = {(r.task, r.draft, r.temperature): [None] * 3 for r in paper_tables.TABLE_2}
    at["CNN/DM", "small", 1.0] = [0.01, 1.02, 1.9]
    assert [row[:3] + row[5:] for row in table.values] == [
        [r.task, f"T5-{r.draft}", r.temperature, r.measured, *at[r.task, r.draft, r.temperature]]
        for r in paper_tables.TABLE_2
    ]


def test_a_quick_run_compiles_one_draft_and_gamma(libtpu):
    libtpu(True)
    asked = []
    for options in (QUICK, ReproduceOptions()):
        compiled_steps.measure(options, lambda name, inputs, *_: asked.append(inputs["rows"]))
    assert asked[0] == [("EnDe", "small", 0.0), ("EnDe", "small", 1.0)]
    assert len(asked[1]) == 12
    libtpu(False)
    assert compiled_steps.measure(QUICK, computed) == []


def rate(draft, temperature, alpha, **values) -> dict:
    interval = (
        None if alpha is None else {"value": alpha, "low": alpha - 0.01, "high": alpha + 0.01}
    )
    base = {"top_k": 0, "top_p": 0.0, "lenience": 1.0, "num_tokens": 600, "share_proposed": 1.0}
    return base | {"draft": draft, "temperature": temperature, "alpha": interval} | values


GOOD = {"unigram": (0.08, 0.07), "bigram": (0.2, 0.19), "transformer": (0.75, 0.62)}
RATES = [
    rate(draft, temperature, alphas[int(temperature)])
    for draft, alphas in (GOOD | {"copy": (0.5, None)}).items()
    for temperature in (0.0, 1.0)
]


def test_table_3_has_all_of_the_papers_rows(content):
    tables = content(TABLE_3, {})
    found = [
        (pair.stands_for, *row[:3])
        for pair, table in zip(pairs.PAIRS, tables, strict=True)
        for row in table.values
    ]
    assert found == [(r.target, r.draft, r.temperature, r.alpha) for r in paper_tables.TABLE_3]
    # Ours are of other texts, which the caption names.
    assert "T5-XXL (CNN/DM) and our t5-target (package summaries)" in [t.caption for t in tables]


def test_ours_are_beside_the_papers_smallest_and_extra_drafts_after_them(content):
    _, table, summaries, _ = content(TABLE_3, {"acceptance/ende": {"rows": RATES}})
    at = {(row[0], row[3], row[1]): row[2:] for row in table.values}
    low, high = 0.75 - 0.01, 0.75 + 0.01
    assert at["T5-small", "transformer", 0.0] == [0.75, "transformer", 0.75, low, high, 600, 1.0]
    assert at["T5-base", None, 0.0] == [0.8] + [None] * 6
    assert at[None, "copy", 0.0][:3] == [None, "copy", 0.5]
    # A draft that never proposed has no rate, and is not left out.
    assert at[None, "copy", 1.0] == [None, "copy", None, None, None, 600, 1.0]
    # The same target has other rates on other texts.
    assert {value for row in summaries.values for value in row[3:]} == {None}


def test_a_filter_has_its_own_rows_and_shares_those_of_temperature_0(content):
    rows = [rate("transformer", 1.0, 0.9, top_k=40), *RATES]
    gpt, *_, lamda = content(TABLE_3, {"acceptance/lm": {"rows": rows}})

    def alphas(table):
        return [row[4] for row in table.values if row[3] == "transformer"]

    assert (alphas(gpt), alphas(lamda)) == ([0.75, 0.62], [0.75, 0.9])


def test_table_5_has_the_papers_rows(content):
    lenient = [
        rate("transformer", temperature, alpha, lenience=lenience)
        for temperature in (0.0, 1.0)
        for lenience, alpha in zip((1.0, 0.5, 0.3, 0.1), (0.6, 0.7, 0.75, 0.84), strict=True)
    ]
    at_1, at_0 = content(TABLE_5, {"acceptance/ende": {"rows": lenient}})
    assert [tuple(row[:3]) for row in at_1.values] == [
        (r.draft, r.lenience, r.alpha) for r in paper_tables.TABLE_5
    ]
    assert len(at_0.rows) == len(paper_tables.ARGMAX_LENIENCE)
    # Section A.5 bounds probabilities when sampling alone.
    assert ["1/l times" in table.note for table in (at_1, at_0)] == [True, False]
    (first,) = [row for row in at_1.values if row[:2] == ["T5-small", 1.0]]
    assert first[3:] == ["transformer", 0.6, 0.6 - 0.01, 0.6 + 0.01, 600]
    bare = content(TABLE_5, {})
    assert {value for table in bare for row in table.values for value in row[3:]} == {None}


def test_doubtful_rows_are_marked(content, rows):
    table = content(speed_ups.TABLE_2, {"table2/ende/transformer/t0": {"rows": rows}})[-1]
    marked = [row["range"].endswith(" †") for row in table.rows]
    assert marked == [row["draft"] == "bigram" or row["gamma"] == 7 for row in rows]
    assert "† Not to be relied on" in table.note and "up to 45% of the processors" in table.note
    calm = {"table2/ende/transformer/t0": {"rows": rows[:1]}}
    assert "†" not in str(content(speed_ups.TABLE_2, calm)[-1])


def test_figure_5_lays_the_measured_steps_one_after_the_other(content, timeline):
    speculative = decodes.blocks(timeline[0])
    kinds = [kind for kind, *_ in speculative]
    assert kinds == ["encoders and prefill", *["draft", "draft", "target"] * 2]
    assert [start for _, start, _ in speculative] == [0, 3.0, 3.5, 4.0, 6.0, 6.5, 7.0]
    (figure,) = content(decodes.FIGURE_5, {"figure5": {"runs": timeline}})
    assert "γ = 2 took 10 ms as a whole; standard decoding took 8 ms as a whole." in figure.caption
    (axes,) = figure.plot.axes
    # A bar for each block; the tokens of each speculative call over it.
    assert len(axes.collections) == 7 + 5
    assert [text.get_text() for text in axes.texts] == ["3", "1"]
    assert content(decodes.FIGURE_5, {}) == content(decodes.FIGURE_1, {}) == []
    busy = [run | {"beside": 0.4} for run in timeline]
    (figure,) = content(decodes.FIGURE_5, {"figure5": {"runs": busy}})
    assert "other programs used up to 40% of the processors" in figure.caption


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("alpha", "tried"), [(0.9, [7]), (0.75, [7, 3]), (0.3, [7, 1]), (0.05, [7])]
)
def test_the_best_gamma_is_that_of_the_measured_costs(made_up, monkeypatch, alpha, tried):  # noqa: F811
    """Drafts cost 0.1 and each further token of a call a tenth: the other T(m) are on a line."""

    def factor(gamma):
        return sum(alpha**i for i in range(gamma + 1)) / (1 + 0.1 * gamma + 0.1 * gamma)

    times, asked = StepTimes(target=2.0, draft=0.2, verification=3.4), []

    def compare(generator, texts, decoding, repeats):
        asked.append(decoding.gamma)
        assert (decoding.verifier, texts, repeats) == ("token", ["a"], 3)
        return dataclasses.replace(made_up, gamma=decoding.gamma, alpha=alpha, step_times=times)

    target = types.SimpleNamespace(with_draft=lambda draft: None)
    monkeypatch.setattr(pairs, "load_target", lambda name: target)
    monkeypatch.setattr(pairs, "load_draft", lambda *_: None)
    monkeypatch.setattr(pairs, "of_one_shape", lambda *_: ["a"])
    monkeypatch.setattr(speed_ups, "compare", compare)
    settings = {"temperature": 0.0, "gamma": 7, "try_best": True, "seed": 0, "repeats": 3}
    settings |= {"num_texts": 2, "max_decode_len": 8}
    found = speed_ups.measure(pairs.ENDE, "bigram", ["a", "b"], settings)
    best = max(range(9), key=factor)
    assert asked == tried == ([7] if best in (0, 7) else [7, best])
    texts = [f"{gamma} *" if gamma == best else f"{gamma}" for gamma in tried]
    assert [row["gamma_text"] for row in found["rows"]] == texts
    assert [row["range"] for row in found["rows"]] == ["1.00–3.00"] * len(tried)
    assert found["tokens"] == 3 * 240 * len(tried)
    asked.clear()
    assert (
        len(speed_ups.measure(pairs.ENDE, "bigram", ["a"], settings | {"try_best": False})["rows"])
        == 1
    )
    assert asked == [7]


@pytest.mark.usefixtures("unchecked")
def test_runs_of_figure_5_are_in_milliseconds_of_their_own_way(made_up):  # noqa: F811
    event = types.SimpleNamespace(proposed=[5, 6], appended=[5, 6, 7])
    speculative, plain = decodes._run(2, made_up, [event] * 3), decodes._run(0, made_up, [])
    shared = {"draft_step": 0.2, "tokens": 120, "beside": 0.0, "noise": False}
    assert speculative == shared | {
        "run": "γ = 2",
        "setup": 500.0,
        "target_step": 3.0,
        "proposed": [2] * 3,
        "appended": [3] * 3,
        "measured": 1500.0,
    }
    assert plain == shared | {
        "run": "standard decoding",
        "setup": 1000.0,
        "target_step": 2.0,
        "proposed": [0] * 120,
        "appended": [1] * 120,
        "measured": 3000.0,
    }


@pytest.mark.parametrize("quick", [True, False])
def test_pairs_of_one_target_and_texts_share_a_measurement(quick):
    asked = {}

    def results(name, inputs, compute):
        asked.setdefault(name, []).append(inputs)

    options = ReproduceOptions(quick=quick)
    for pair in pairs.PAIRS:
        assert acceptance_rates.measure_rates(pair, options, results) == []
    shared, of_ende, _ = asked.values()
    assert list(asked) == ["acceptance/lm", "acceptance/ende", "acceptance/summaries"]
    # LaMDA's filter is measured with the language model's texts.
    assert len(shared) == 2 and shared[0] == shared[1]
    assert shared[0]["settings"]["top_ks"] == (0, 40)
    assert shared[0]["settings"]["leniences"] == (1.0,)
    settings = of_ende[0]["settings"]
    assert (settings["top_ks"], settings["leniences"]) == ((0,), (1.0, 0.5, 0.3, 0.1))
    # As many tokens as in the paper.
    assert settings["num_tokens"] == (600 if quick else 10_000)
    assert of_ende[0]["drafts"][:3] == ["unigram", "bigram", "transformer"]


# Measured with a tiny pair

SENTENCE = "My sister"


@pytest.fixture
def tiny(tiny_pair, monkeypatch, quick_compilation, kept_programs):
    """Replaces the packaged pairs by one whose programs are compiled in a moment."""
    generator = Generator.load(tiny_pair / "target", tiny_pair / "draft")
    monkeypatch.setattr(pairs, "load_target", lambda name: generator.plain())
    monkeypatch.setattr(pairs, "load_draft", lambda target, draft: generator.draft)
    monkeypatch.setattr(pairs.Pair, "texts", lambda pair, options, count: [SENTENCE] * 2)


def computed(item):
    """Returns what a quick run shows of an item, and what it measures for that."""
    found = {}

    def results(name, inputs, compute):
        json.dumps(inputs)
        found[name] = json.loads(json.dumps(compute()))
        return found[name]

    return item.content(QUICK, results), found


@pytest.mark.usefixtures("tiny")
def test_table_2_and_figure_5_are_measured(monkeypatch, libtpu):
    libtpu(False)
    effort = {"pool": 6, "num_texts": 2, "max_decode_len": 8, "repeats": 1}
    monkeypatch.setattr(speed_ups, "_QUICK", effort)
    monkeypatch.setattr(speed_ups, "_QUICK_RUNS", [(pairs.ENDE, "transformer", 0.0)])
    # Where the best gamma is the paper's, nothing else is decoded.
    monkeypatch.setattr(speed_ups.formulas, "optimal_gamma", lambda *_: 7)
    (_, measured), found = computed(speed_ups.TABLE_2)
    (result,) = found.values()
    (row,) = result["rows"]
    assert row["gamma_text"] == "7 *"
    assert 0 < row["alpha"] <= 1 <= row["block_efficiency"] <= 8
    assert row["speed_up"] == pytest.approx(
        row["speculative_tokens_per_second"] / row["plain_tokens_per_second"]
    )
    assert row["same_text"] == "yes"
    assert result["tokens"] == row["plain_tokens"] + row["speculative_tokens"] > 8
    empty = [
        c.key for c, value in zip(measured.columns, *measured.values, strict=True) if value is None
    ]
    # On a busy machine the prefills alone may take longer than the whole.
    assert empty == ["loop_speed_up"] * (row["loop_speed_up"] is None)
    # Shapes and gamma of Table 2: nothing is compiled again.
    monkeypatch.setattr(decodes, "_MAX_DECODE_LEN", 8)
    monkeypatch.setattr(decodes, "_GAMMAS_5", (7,))
    monkeypatch.setattr(decodes, "_SENTENCE", SENTENCE)
    _, found = computed(decodes.FIGURE_5)
    runs = found["figure5"]["runs"]
    assert [run["tokens"] for run in runs] == [sum(run["appended"]) for run in runs]
    assert set(runs[-1]["proposed"]) == {0} and set(runs[0]["proposed"]) <= set(range(8))


@pytest.mark.usefixtures("tiny")
def test_figure_1_is_a_real_decode(monkeypatch):
    monkeypatch.setattr(decodes, "_SENTENCE", SENTENCE)
    (figure,), found = computed(decodes.FIGURE_1)
    lines = figure.trace
    assert figure.caption.startswith(f"{traces.counts(lines)}; the paper's example has 38 tokens")
    assert found["figure1"]["tokens"] == traces.num_tokens(lines) > len(lines) > 1
    assert any(line.rejected for line in lines) and any(line.accepted for line in lines)


@pytest.mark.usefixtures("tiny")
def test_rates_are_measured(monkeypatch):
    values = {"_MAX_DECODE_LEN": 8, "LENIENCES": (1.0, 0.3), "TEMPERATURES": (1.0,)}
    for name, value in (values | {"_DRAFTS": ("transformer",)}).items():
        monkeypatch.setattr(acceptance_rates, name, value)
    (table, _), found = computed(TABLE_5)
    rates = found["acceptance/ende"]["rows"]
    assert [(row["draft"], row["lenience"]) for row in rates] == [
        ("transformer", 1.0),
        ("transformer", 0.3),
    ]
    shown = [row for row in table.values if row[4]]
    assert len(shown) == 2 and all(0 <= row[5] <= row[4] <= row[6] for row in shown)


# Dependencies of a measurement


@pytest.mark.parametrize("changed", ["t5-target", "t5-draft", "texts"])
def test_another_model_or_text_is_noticed(monkeypatch, changed):
    real, texts = digests.files_digest, ["a", "b"]
    before = pairs.inputs(pairs.ENDE, ("transformer",), texts)
    if changed == "texts":
        texts = ["a", "c"]
    else:
        other = lambda name: {"content": "other"} if name == changed else real(name)  # noqa: E731
        monkeypatch.setattr(digests, "files_digest", other)
    assert pairs.inputs(pairs.ENDE, ("transformer",), texts) != before
