"""Items of the report that are computed in a moment, and a report of them."""

from pathlib import Path

import pytest

from spec_t5x.experiments.reproduction import closed_forms, curves, decodes, speed_ups
from spec_t5x.experiments.reproduction import run as running
from spec_t5x.experiments.reproduction.columns import Origin, compiled, label, measured
from spec_t5x.experiments.reproduction.contents import Figure, Item, ReproduceOptions, Table
from spec_t5x.experiments.traces import TraceLine
from spec_t5x.theory import formulas


def speed_up_row(draft: str, temperature: float, gamma: int, alpha: float, c: float) -> dict:
    """A row as the measurements of Table 2 return it, with made-up numbers."""
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
        "predicted_speed_up": float(formulas.wall_time_improvement(alpha, gamma, c)),
        "predicted_speed_up_with_verification": float(
            formulas.wall_time_improvement(alpha, gamma, c, cost)
        ),
    }


def measure_all(options, results) -> dict:
    """Instead of ``speed_ups.measure_all``: two drafts, three gammas, two temperatures."""
    rows = [
        speed_up_row(draft, temperature, gamma, alpha - 0.1 * temperature, c)
        for draft, alpha, c in (("transformer", 0.7, 0.05), ("bigram", 0.25, 0.002))
        for temperature in (0.0, 1.0)
        for gamma in (2, 3, 7)
    ]
    name = "table2/made-up"
    return {name: results(name, {}, 3.0, lambda: {"tokens": 4321, "rows": rows})}


@pytest.fixture
def rows() -> list[dict]:
    """The made-up rows."""
    return speed_ups.rows(measure_all(None, lambda name, inputs, seconds, compute: compute()))


_TRACE = [
    TraceLine(before=[], accepted=["a", "``` <b>"], rejected="x", corrected="c"),
    TraceLine(before=["a", "``` <b>", "c"], accepted=["[END]"], rejected=None, corrected=None),
]
_TIMELINE = [
    {
        "run": "γ = 2",
        "tokens": 4,
        "setup": 3.0,
        "draft_step": 0.5,
        "target_step": 2.0,
        "proposed": [2, 2],
        "appended": [3, 1],
        "measured": 9.5,
    },
    {
        "run": "standard decoding",
        "tokens": 4,
        "setup": 2.0,
        "draft_step": 0.5,
        "target_step": 1.5,
        "proposed": [0] * 4,
        "appended": [1] * 4,
        "measured": 8.5,
    },
]


@pytest.fixture
def timeline() -> list[dict]:
    """The made-up runs of Figure 5: speculative and plain."""
    return _TIMELINE


# What HTML would read as marks of its own.
HOSTILE = "a <b>|bar|</b> & `x|y` *stars* _under_ [link](to) \\ # $x^2$"


def render_hostile(options, found) -> list[Table | Figure]:
    """Texts that must be escaped, a decode and an empty cell."""
    table = Table(
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
    trace = Figure(name="trace", caption=HOSTILE, origins=(Origin.MEASURED,), trace=_TRACE)
    return [table, trace]


@pytest.fixture(scope="session")
def report(tmp_path_factory) -> Path:
    """The directory of a report: closed forms, made-up measurements, hostile texts."""
    output = tmp_path_factory.mktemp("report")
    timed = {"timeline": {"runs": _TIMELINE}}
    items = {
        "table1": closed_forms.TABLE_1,
        "table2": speed_ups.TABLE_2._replace(
            compute=lambda *run: measure_all(*run) | {"compiled": None}
        ),
        "table4": closed_forms.TABLE_4,
        "figure2": curves.FIGURE_2._replace(compute=measure_all),
        "figure3": curves.FIGURE_3._replace(compute=measure_all),
        "figure4": curves.FIGURE_4._replace(compute=measure_all),
        "figure5": decodes.FIGURE_5._replace(compute=lambda *_: timed),
        "factors": closed_forms.FACTORS,
        "hostile": Item(HOSTILE, closed_forms.nothing, render_hostile),
    }
    said: list[str] = []
    assert running.reproduce(items, ReproduceOptions(), output, said.append) == 0, said
    return output
