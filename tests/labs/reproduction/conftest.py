"""Made-up results of measurements, and a report that shows them."""

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

# Two drafts, three gammas, two temperatures; some timed beside other programs, some impossible.
_ROWS = [
    {
        "task": "EnDe",
        "draft": draft,
        "temperature": temperature,
        "alpha": 0.7 - 0.1 * temperature,
        "c": 0.05,
        "verification_cost": 1.3,
        "block_efficiency": 2.1,
        "speed_up": 1.9,
        "gamma": gamma,
        "gamma_text": f"{gamma} *",
        "predicted_speed_up": 2.3,
        "predicted_speed_up_with_verification": 2.1,
        "range": "1.78–2.19",
        "loop_speed_up": 2.1,
        "plain_tokens_per_second": 1068.4,
        "same_text": "yes",
        "beside": 0.45 if draft == "bigram" else 0.02,
        "noise": gamma == 7,
    }
    for draft in ("transformer", "bigram")
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
    """Provides made-up rows of Table 2."""
    return _ROWS


@pytest.fixture
def timeline() -> list[dict]:
    """Provides made-up runs of Figure 5: speculative and plain."""
    return _TIMELINE


@pytest.fixture
def content():
    """Provides ``content(item, {name: result})``: a quick run's content with only these results."""

    def of(item, found):
        return item.content(ReproduceOptions(quick=True), lambda name, *_: found.get(name))

    return of


# A text full of HTML's and Markdown's special characters.
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
    """Returns the item with made-up results in place of measurements."""

    def content(options, results):
        def get(name, *_):
            if name == "table2/ende/transformer/t0":
                return results(name, {}, lambda: {"tokens": 4321, "rows": _ROWS})
            return {"runs": _TIMELINE} if name == "figure5" else None

        return item.content(options, get)

    return item._replace(content=content)


@pytest.fixture(scope="session")
def report(tmp_path_factory) -> Path:
    """Provides a report's directory: closed forms, made-up results, texts to be escaped."""
    output = tmp_path_factory.mktemp("report")
    items = {
        "table1": closed_forms.TABLE_1,
        "table2": made_up(speed_ups.TABLE_2),
        "table4": closed_forms.TABLE_4,
        "figure2": curves.FIGURE_2,
        "figure3": curves.FIGURE_3,
        "figure4": curves.FIGURE_4,
        "figure5": made_up(decodes.FIGURE_5),
        "factors": closed_forms.FACTORS,
        "hostile": Exhibit(HOSTILE, hostile),
    }
    assert running.reproduce(items, ReproduceOptions(), output) == 0
    return output
