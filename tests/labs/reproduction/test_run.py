"""A run is planned, measured, stopped, resumed, and survives failures."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.reproduction import run as running
from spec_t5x.labs.reproduction.columns import label
from spec_t5x.labs.reproduction.contents import Exhibit, ReportTable, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Results

REPOSITORY = Path(__file__).parents[3]


class Workshop:
    """Items whose measurements note that they are made."""

    def __init__(self):
        self.measured: list[str] = []
        # Name to what it raises.
        self.broken: dict[str, BaseException] = {}

    def item(self, *names: str, only_kept: bool = False) -> Exhibit:
        def content(options, results):
            get = results.kept if only_kept else results
            found = {
                name: get(name, {"n": 1}, 60.0, lambda n=name: self.measure(n)) for name in names
            }
            rows = [{"name": f"has {name}"} for name in names if found[name]]
            return [ReportTable(caption="c", columns=(label("name"),), rows=rows)]

        return Exhibit("title", content)

    def measure(self, name: str) -> dict:
        if name in self.broken:
            raise self.broken[name]
        self.measured.append(name)
        return {"tokens": 10}


@pytest.fixture
def shop():
    return Workshop()


@pytest.fixture
def run(tmp_path, caplog):
    """``run(**items)``: exit status and what was logged."""
    caplog.set_level("INFO", logger="spec_t5x")

    def run_items(**items):
        caplog.clear()
        status = running.reproduce(items, ReproduceOptions(), tmp_path / "out")
        return status, "\n".join(caplog.messages)

    return run_items


def report_of(tmp_path) -> str:
    return (tmp_path / "out" / "report.html").read_text()


def test_measurements_are_made_once_and_kept(shop, run, tmp_path):
    items = {"one": shop.item("a", "b"), "two": shop.item("b", "c")}
    status, said = run(**items)
    assert (status, shop.measured) == (0, ["a", "b", "c"])
    assert "the full run takes about 3 min: 3 measurements, 0 more are kept" in said
    assert "[2/3] b, about 60 s" in said
    first = report_of(tmp_path)
    assert first.count(">has b<") == 2

    status, said = run(**items)
    assert (status, shop.measured) == (0, ["a", "b", "c"])
    assert said == f"the report is {tmp_path / 'out' / 'report.html'}"
    # But for the date, the same report.
    date = re.compile("<dt>Written</dt>.*")
    assert date.sub("", report_of(tmp_path)) == date.sub("", first)


@pytest.mark.parametrize("error", [InputError("x is 3: give 4"), KeyError("gone"), MemoryError()])
def test_a_failure_does_not_lose_the_others(shop, run, tmp_path, error):
    shop.broken["b"] = error
    items = {"one": shop.item("a", "b"), "two": shop.item("c"), "three": shop.item("b")}
    status, said = run(**items)
    assert (status, shop.measured) == (1, ["a", "c"])
    assert "one not computed: b: " in said and "three not computed: b: " in said
    report = report_of(tmp_path)
    assert "has a" in report and "has c" in report
    assert report.count("Not computed: b: ") == 2

    shop.broken.clear()
    assert run(**items)[0] == 0
    assert shop.measured == ["a", "c", "b"]
    assert "Not computed" not in report_of(tmp_path)


def test_an_item_that_cannot_be_shown_is_reported(shop, run, tmp_path):
    def fail(options, results):
        shop.item("a").content(options, results)
        raise RuntimeError("no such luck")

    status, said = run(ill=Exhibit("t", fail), well=shop.item("b"))
    assert (status, shop.measured) == (1, ["a", "b"])
    assert "ill not computed: RuntimeError: no such luck" in said
    assert "has b" in report_of(tmp_path)


def test_doubtful_times_are_told_at_the_end_of_every_run(shop, run, tmp_path):
    def measure(name):
        # Rates have no time; a figure shows the rows that a table has measured.
        return {"rows": [{"beside": 0.45}, {"beside": 0.0}, {"alpha": 0.5}], "tokens": 1}

    shop.measure = measure
    items = {"table2": shop.item("a"), "figure2": shop.item("a", only_kept=True)}
    for _ in range(2):
        status, log = run(**items)
        assert status == 0
        assert (
            "Not to be relied on (1 of 2 rows): other programs used up to 45% of the processors. "
            f"Results are kept in {tmp_path}"
        ) in log
        assert log.endswith("report.html")


def test_a_curve_shows_what_is_kept_and_measures_nothing(shop, run, tmp_path):
    curve, owner = shop.item("b", only_kept=True), shop.item("b")
    assert run(curve=curve)[0] == 0
    assert shop.measured == [] and "has b" not in report_of(tmp_path)
    run(owner=owner)
    run(curve=curve)
    assert shop.measured == ["b"] and "has b" in report_of(tmp_path)
    # A failure is the owner's.
    shop.broken["b"] = InputError("gone")
    shutil.rmtree(tmp_path / "out" / "cache")
    run(owner=owner, curve=curve)
    assert report_of(tmp_path).count("Not computed:") == 1


# Measures a to d; in the one named on its command line, it sends itself a signal.
STOPPED_RUN = """
import os, sys
from pathlib import Path
from spec_t5x.labs.reproduction.contents import Exhibit, ReproduceOptions
from spec_t5x.labs.reproduction.run import reproduce

output, deadly, number = sys.argv[1:]

def measure(name):
    if name == deadly:
        os.kill(os.getpid(), int(number))
        while True:
            pass
    print(name, flush=True)
    return {}

def content(options, results):
    for name in "abcd":
        results(name, {"n": 1}, 1.0, lambda: measure(name))
    return []

sys.exit(reproduce({"one": Exhibit("one", content)}, ReproduceOptions(), Path(output)))
"""


def test_a_signal_leaves_what_is_finished_and_the_same_command_resumes(shop, run, tmp_path):
    def run_stopped(deadly, number):
        result = subprocess.run(
            [sys.executable, "-c", STOPPED_RUN, tmp_path / "out", deadly, str(int(number))],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return result.returncode, result.stdout.split(), result.stderr

    status, measured, said = run_stopped("b", signal.SIGINT)
    assert (status, measured) == (130, ["a"])
    assert "stopped by SIGINT: what was finished is kept in" in said
    assert "Traceback" not in said
    status, measured, _ = run_stopped("d", signal.SIGKILL)
    assert (status, measured) == (-signal.SIGKILL, ["b", "c"])
    assert not (tmp_path / "out" / "report.html").exists()
    unfinished = tmp_path / "out" / "cache" / ".half.json.12345678.writing"
    unfinished.touch()
    status, said = run(one=shop.item(*"abcd"))
    assert not unfinished.exists()
    assert (status, shop.measured) == (0, ["d"])
    assert "1 measurements, 3 more are kept" in said
    assert (tmp_path / "out" / "report.html").exists()


def test_the_list_says_what_there_is_and_how_long_it_takes(shop):
    def fail(*_):
        raise InputError("no data")

    items = {
        "one": shop.item("a", "b"),
        "curve": shop.item("a", only_kept=True),
        "broken": Exhibit("broken", fail),
    }
    assert running.listing(items, ReproduceOptions()).splitlines() == [
        "one     title (about 2 min)",
        "curve   title (a moment)",
        "broken  broken (cannot be computed: no data)",
    ]
    assert shop.measured == []


# A function stands for the results.
@pytest.mark.usefixtures("unchecked")
def test_all_can_be_planned_and_the_quick_run_is_estimated_at_less_than_ten_minutes():
    assert list(running.ITEMS)[:10] == [
        *(f"table{n}" for n in range(1, 6)),
        *(f"figure{n}" for n in range(1, 6)),
    ]
    assert list(running.select(["figure2", "table1"])) == ["table1", "figure2"]
    plans = []
    for quick in (True, False):
        plan = Results(None, {})
        inputs = {}

        def note(name, its_inputs, seconds, compute, plan=plan, inputs=inputs):
            # One name stands for one measurement.
            assert inputs.setdefault(name, its_inputs) == its_inputs
            json.dumps(its_inputs)
            return plan(name, its_inputs, seconds, compute)

        note.kept = note
        for item in running.select(["all"]).values():
            item.content(ReproduceOptions(quick=quick), note)
        plans.append((plan.missing, inputs))
    (quick, quick_inputs), (full, full_inputs) = plans
    assert sum(quick.values()) < 600 < sum(full.values())
    assert quick.keys() < full.keys()
    assert all(quick_inputs[name] != full_inputs[name] for name in quick if name != "figure1")
