"""Figures 1 and 5 and the synthetic Table 2, from made-up results."""

import dataclasses
import json

import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments import paper_tables, synthetic_acceptance
from spec_t5x.experiments.reproduction import examples, measured_figures, pairs, synthetic_speed
from spec_t5x.experiments.reproduction.items import Done, Setting
from spec_t5x.experiments.timeline import Event, Run
from spec_t5x.experiments.traces import Trace, TraceLine
from spec_t5x.inference import fingerprints

QUICK = Setting(quick=True)


def test_figure_1_counts_tokens_and_calls_and_has_all_three_files():
    trace = Trace(
        lines=(
            TraceLine(before=(), accepted=("a", "b"), rejected="x", corrected="c"),
            TraceLine(before=("a", "b", "c"), accepted=("[END]",), rejected=None, corrected=None),
        )
    )
    result = {
        "tokens": trace.num_tokens,
        "pair": "ende",
        "text": "a <b>",
        "options": {"gamma": 5, "temperature": 0.0, "seed": 0},
        "lines": trace.to_json(),
    }
    done = {"figure1": Done(result=json.loads(json.dumps(result)), provenance={})}
    shown = measured_figures.FIGURE_1.render(QUICK, done)
    assert shown.finding.startswith("4 tokens with 2 serial calls of the target;")
    (drawing,) = shown.content
    assert set(drawing.files) == {"figure1.html", "figure1.txt"}
    assert drawing.svg.startswith("<svg")
    assert "[-x-] {+c+}" in drawing.text
    assert not measured_figures.FIGURE_1.render(QUICK, {}).content


def run(gamma: int, calls: int, loop_us: float) -> Run:
    events = [Event(name="target call", kind="target", start_us=1.0, duration_us=900.0)]
    if gamma:
        events.append(Event(name="draft", kind="draft", start_us=950.0, duration_us=50.0))
    return Run(gamma=gamma, events=tuple(events), num_tokens=6, target_calls=calls, loop_us=loop_us)


def test_figure_5_names_the_fastest_run_and_links_the_trace():
    def shown(loops):
        runs = [run(7, 2, loops[0]), run(3, 3, loops[1]), run(0, 6, loops[2])]
        result = {"tokens": 18, "text": "x", "runs": [r.to_json() for r in runs]}
        done = {"figure5": Done(result=json.loads(json.dumps(result)), provenance={})}
        return measured_figures.FIGURE_5.render(QUICK, done)

    section = shown((1000.0, 900.0, 1200.0))
    assert section.finding == (
        "The compiled loops, gamma 7: 6 tokens in 2 target calls, 1.0 ms; gamma 3: 6 tokens in 3 "
        "target calls, 0.9 ms; standard decoding: 6 tokens in 6 target calls, 1.2 ms: the fastest "
        "is gamma 3."
    )
    assert shown((1000.0, 900.0, 800.0)).finding.endswith("the fastest is standard decoding.")
    drawing, table = section.content
    assert json.loads(drawing.files["figure5.trace.json"])["traceEvents"]
    assert all(len(line) == len(table.columns) for line in table.rows)
    # Milliseconds of the target, the draft, nothing of the encoders, and the loop's.
    assert table.rows[0][3:5] == (0.9, 0.05)
    assert table.rows[2][4] is None
    assert table.rows[0][-1] == 1.0


def synthetic_row(**values) -> dict:
    paper = paper_tables.TABLE_2[0]
    base = {
        "row": {
            "draft": "t5_1_1_small",
            "temperature": paper.temperature,
            "gamma": paper.gamma,
            "alpha": paper.alpha,
            "paper": dataclasses.asdict(paper),
        },
        "num_tokens": 64,
        "plain_seconds": [1.0, 1.1, 1.2],
        "speculative_seconds": [0.5, 0.5, 0.6],
        "plain_setup_seconds": [0.1, 0.1, 0.1],
        "speculative_compile_seconds": 9.0,
        "acceptance_rate": 0.74,
        "block_efficiency": 3.5,
        "c": 0.1,
        "verification_cost": 1.5,
        "expected": 2.1,
        "expected_with_verification": 1.6,
        "speed_up": 1.5,
        "speed_up_range": [1.4, 1.6],
        "loop_speed_up": 1.52,
    }
    return base | values


def test_the_synthetic_table_says_what_it_is_and_how_near_theory_comes():
    def shown(target, **values):
        result = {
            "tokens": 192,
            "target": target,
            "source_len": 64,
            "decode_len": 64,
            "rows": [synthetic_row(**values)],
        }
        return synthetic_speed.SYNTHETIC.render(
            QUICK, {"synthetic": Done(result=result, provenance={})}
        )

    section = shown("t5_1_1_base")
    text = " ".join(section.paragraphs)
    assert "Weights are random" in text
    assert "its speed-ups are not the paper's" in text
    assert "its speed-ups are not the paper's" not in " ".join(
        shown(paper_tables.TARGET).paragraphs
    )
    assert section.finding == (
        "1 of 1 rows gain; the loop's speed-up is within 5% of Theorem 3.8 with T(m) counted, "
        "and within 28% of it with T(m) = 1."
    )
    assert shown("t5_1_1_base", speed_up=0.9).finding.startswith("0 of 1 rows gain")
    (table,) = section.content
    assert all(len(line) == len(table.columns) for line in table.rows)
    assert table.rows[0][-2:] == (3.2, 3.4)


def test_pairs_that_are_not_packaged_are_named_and_never_loaded():
    absent = dataclasses.replace(pairs.ENDE, name="absent", target="absent-target")
    assert pairs.missing(absent) == ("the package has no absent-target, transformer draft for it")
    assert pairs.present(pairs=(absent, pairs.ENDE)) == [pairs.ENDE]
    assert pairs.none_present(pairs=(absent,)) == pairs.missing(absent)
    assert pairs.none_present(pairs=(absent, pairs.ENDE)) is None
    (said,) = pairs.absences((absent, pairs.ENDE))
    assert said.startswith("Nothing stands for T5-XXL (EnDe): the package has no absent-target")


def test_parts_depend_on_models_texts_and_settings():
    def inputs(item, setting):
        return {part.name: part.inputs for part in item.parts(setting)}

    for item in (measured_figures.FIGURE_1, measured_figures.FIGURE_5):
        ours = inputs(item, QUICK)
        json.dumps({name: dict(values) for name, values in ours.items()})
        assert ours == inputs(item, QUICK)
        assert ours != inputs(item, Setting(quick=True, seed=1))


@pytest.mark.parametrize("changed", ["target", "transformer", "texts"])
def test_another_model_or_text_is_noticed(monkeypatch, changed):
    names = {"target": pairs.ENDE.target, "transformer": "ende-draft"}
    real = fingerprints.fingerprint
    texts = examples.sentences(QUICK, 3)
    before = pairs.inputs(pairs.ENDE, ("transformer",), texts)
    if changed == "texts":
        texts = examples.sentences(QUICK, 2)
    else:
        monkeypatch.setattr(
            fingerprints,
            "fingerprint",
            lambda name: {"content": "other"} if name == names[changed] else real(name),
        )
    assert pairs.inputs(pairs.ENDE, ("transformer",), texts) != before


def test_the_synthetic_part_takes_what_the_device_holds(monkeypatch):
    monkeypatch.setattr(synthetic_acceptance, "check_memory", lambda options: None)
    (quick,), (full,) = (synthetic_speed.SYNTHETIC.parts(Setting(quick=q)) for q in (True, False))
    assert quick.inputs["options"]["target"] == full.inputs["options"]["target"] == "t5_1_1_base"
    assert quick.inputs["options"]["drafts"] == full.inputs["options"]["drafts"]
    assert (quick.inputs["rows"], full.inputs["rows"]) == (1, 4)
    assert synthetic_speed.SYNTHETIC.unavailable(QUICK) is None

    def too_large(options):
        raise InputError("too large")

    monkeypatch.setattr(synthetic_acceptance, "check_memory", too_large)
    assert synthetic_speed.SYNTHETIC.parts(QUICK) == []
    assert synthetic_speed.SYNTHETIC.unavailable(QUICK).startswith("this device has no room for")
