"""Items of the report that are computed in a moment, and reports of them."""

import io
from pathlib import Path

import pytest

from spec_t5x.experiments.reproduction import closed_forms, curves
from spec_t5x.experiments.reproduction.items import Done, Item, Part, Setting
from spec_t5x.experiments.reproduction.run import Request, reproduce
from spec_t5x.experiments.reproduction.sections import (
    Column,
    Drawing,
    Origin,
    Section,
    Table,
)
from spec_t5x.theory import formulas


def speed_up_row(draft: str, temperature: float, gamma: int, alpha: float, c: float) -> dict:
    """A row as the measured parts of Table 2 return it, with made-up figures."""
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
        "expected": float(formulas.wall_time_improvement(alpha, gamma, c)),
        "expected_with_verification": float(formulas.wall_time_improvement(alpha, gamma, c, cost)),
    }


def speed_up_parts(setting: Setting) -> tuple[Part, ...]:
    """Made-up rows of Table 2: a transformer and a bigram, three gammas, two temperatures."""

    def compute(report):
        rows = [
            speed_up_row(draft, temperature, gamma, alpha - 0.1 * temperature, c)
            for draft, alpha, c in (("transformer", 0.7, 0.05), ("bigram", 0.25, 0.002))
            for temperature in (0.0, 1.0)
            for gamma in (2, 3, 7)
        ]
        return {"tokens": 4321, "rows": rows}

    return (Part(name="table2/made-up", inputs={"version": 1}, seconds=3.0, compute=compute),)


# What HTML and Markdown would read as marks of their own.
HOSTILE = "a <b>|bar|</b> & `x|y` *stars* _under_ [link](to) \\ # $x^2$"
LINE = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 40 10'><path d='M0 5h40'/></svg>"


def render_hostile(setting, done) -> Section:
    """A section of texts that must be escaped, a drawing and an empty cell."""
    return Section(
        title="Hostile",
        finding=HOSTILE,
        paragraphs=(HOSTILE,),
        content=(
            Table(
                caption=HOSTILE,
                columns=(
                    Column(HOSTILE, Origin.LABEL),
                    Column("count", Origin.COMPILED, "d"),
                    Column("share", Origin.MEASURED),
                ),
                rows=((HOSTILE, 3, 0.126), ("empty", None, float("inf"))),
                notes=(HOSTILE,),
            ),
            Drawing(
                name="line",
                caption=HOSTILE,
                origins=(Origin.MEASURED,),
                svg=LINE,
                files={"line.txt": "a line"},
                text="``` a line",
            ),
        ),
    )


HOSTILE_ITEM = Item(
    name="hostile", title=HOSTILE, parts=closed_forms.no_parts, render=render_hostile
)


def made_up_items() -> tuple[Item, ...]:
    """The closed forms with made-up measurements, and the hostile item."""
    return (
        closed_forms.TABLE_1,
        closed_forms.table_4(speed_up_parts),
        curves.figure_2(speed_up_parts),
        curves.figure_3(speed_up_parts),
        curves.figure_4(speed_up_parts),
        closed_forms.FACTORS,
        HOSTILE_ITEM,
    )


@pytest.fixture(scope="session")
def report(tmp_path_factory) -> Path:
    """The directory of a report on made-up items."""
    output = tmp_path_factory.mktemp("report")
    request = Request(items=made_up_items(), setting=Setting(), output=output)
    assert reproduce(request, io.StringIO()) == 0
    return output


@pytest.fixture(scope="module")
def speed_ups() -> dict[str, Done]:
    """The made-up rows, as ``Item.render`` gets them."""
    (part,) = speed_up_parts(Setting())
    return {part.name: Done(result=part.compute(lambda _: None), provenance={})}
