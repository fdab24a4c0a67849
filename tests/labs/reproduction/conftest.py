"""Made-up results of measurements, and a report of them."""

from pathlib import Path

import pytest

from spec_t5x.labs.benchmark.traces import TraceLine
from spec_t5x.labs.reproduction import closed_forms, curves, decodes, speed_ups
from spec_t5x.labs.reproduction import run as running
from spec_t5x.labs.reproduction.contents import (
    Exhibit,
    Origin,
    ReportFigure,
    ReportTable,
    ReproduceOptions,
    compiled,
    label,
    measured,
)
from spec_t5x.theory import formulas


def speed_up_row(draft: str, temperature: float, gamma: int, alpha: float, c: float) -> dict:
    """Makes a row as the measurements of Table 2 return it, with made-up numbers."""
    cost = 1.3 + 0.03 * gamma
    tokens = float(formulas.expected_tokens(alpha, gamma))
    return {
        "task": "EnDe",
        "draft": draft,
        "temperature": temperature,
        "gamma": gamma,
        "alpha": alpha,
        "c": c,
        "verification_cost": cost,
        "block_efficiency": 0.9 * tokens,
        "accepted_plus_one": 0.97 * tokens,
        "speed_up": 0.9 * tokens / (gamma * c + cost),
        "gamma_text": f"{gamma} *" if gamma == 2 else str(gamma),
        "predicted_speed_up": tokens / (gamma * c + 1),
        "predicted_speed_up_with_verification": tokens / (gamma * c + cost),
        "range": "1.78–2.19",
        "loop_speed_up": tokens / (gamma * c + cost),
        "plain_tokens_per_second": 1068.4,
        "same_text": "yes",
    }


# Two drafts, three gammas, two temperatures; some timed beside other programs, some impossible.
_ROWS = [
    speed_up_row(draft, temperature, gamma, alpha - 0.1 * temperature, c)
    | {"beside": 0.45 if draft == "bigram" else 0.02, "noise": gamma == 7}
    for draft, alpha, c in (("transformer", 0.7, 0.05), ("bigram", 0.25, 0.002))
    for temperature in (0.0, 1.0)
    for gamma in (2, 3, 7)
]
_TRACE = [
    TraceLine(before=[], accepted=["a", "``` <b>"], rejected="x", corrected="c"),
    TraceLine(before=["a", "``` <b>", "c"], accepted=["[END]"], rejected=None, corrected=None),
]
_STEPS = {"tokens": 4, "draft_step": 0.5}
_DRAFTED = {"run": "γ = 2", "setup": 3.0, "target_step": 2.0, "measured": 9.5}
_PLAIN = {"run": "standard decoding", "setup": 2.0, "target_step": 1.5, "measured": 8.5}
_TIMELINE = [
    _STEPS | _DRAFTED | {"proposed": [2, 2], "appended": [3, 1]},
    _STEPS | _PLAIN | {"proposed": [0] * 4, "appended": [1] * 4},
]


@pytest.fixture
def rows() -> list[dict]:
    """Provides rows of Table 2."""
    return _ROWS


@pytest.fixture
def timeline() -> list[dict]:
    """Provides runs of Figure 5: speculative and plain."""
    return _TIMELINE


@pytest.fixture
def content():
    """Provides ``content(item, {name: result})``: what a quick run shows of these results alone."""

    def of(item, found):
        def results(name, *_):
            return found.get(name)

        results.kept = results
        return item.content(ReproduceOptions(quick=True), results)

    return of


# A text that HTML and Markdown would read as marks.
HOSTILE = "a <b>|bar|</b> & `x|y` *stars* _under_ [link](to) \\ # $x^2$"


def hostile(*_) -> list[ReportTable | ReportFigure]:
    """Shows texts that must be escaped, a decode and an empty cell."""
    table = ReportTable(
        caption=HOSTILE,
        columns=(
            label("name", HOSTILE),
            compiled("count", "count", "d"),
            measured("share", "share"),
        ),
        rows=[
            {"name": HOSTILE, "count": 3, "share": 0.126},
            {"name": "empty", "share": float("inf")},
        ],
        note=HOSTILE,
    )
    trace = ReportFigure(name="trace", caption=HOSTILE, origins=(Origin.MEASURED,), trace=_TRACE)
    return [table, trace]


def made_up(item: Exhibit) -> Exhibit:
    """Makes an item that shows the made-up results in place of measurements."""

    def content(options, results):
        def get(name, *_):
            if name == "table2/ende/transformer/t0":
                return results(name, {}, lambda: {"tokens": 4321, "rows": _ROWS})
            return {"runs": _TIMELINE} if name == "figure5" else None

        get.kept = get
        return item.content(options, get)

    return item._replace(content=content)


@pytest.fixture(scope="session")
def report(tmp_path_factory) -> Path:
    """Provides the directory of a report: closed forms, made-up measurements, hostile texts."""
    output = tmp_path_factory.mktemp("report")
    items = {
        "table1": closed_forms.TABLE_1,
        "table2": made_up(speed_ups.TABLE_2),
        "table4": closed_forms.TABLE_4,
        "figure2": made_up(curves.FIGURE_2),
        "figure3": made_up(curves.FIGURE_3),
        "figure4": made_up(curves.FIGURE_4),
        "figure5": made_up(decodes.FIGURE_5),
        "factors": closed_forms.FACTORS,
        "hostile": Exhibit(HOSTILE, hostile),
    }
    assert running.reproduce(items, ReproduceOptions(), output) == 0
    return output
