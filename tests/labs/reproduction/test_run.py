"""A run is measured, stopped, resumed, and survives failures."""

import json
import re
import signal
import sys

import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.reproduction import run as running
from spec_t5x.labs.reproduction.contents import Exhibit, ReportTable, ReproduceOptions, label
from tests.child import finished


class Workshop:
    """Items whose measurements note that they are made."""

    def __init__(self):
        self.measured: list[str] = []
        # The exceptions that measurements raise, by name.
        self.broken: dict[str, BaseException] = {}

    def item(self, *names: str) -> Exhibit:
        def content(options, results):
            found = {
                name: results(name, {"n": 1}, lambda n=name: self.measure(n)) for name in names
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
    """Provides ``run(**items)``: exit status, log and report."""
    caplog.set_level("INFO", logger="spec_t5x")

    def run_items(**items):
        caplog.clear()
        status = running.reproduce(items, ReproduceOptions(), tmp_path / "out")
        return status, caplog.messages, (tmp_path / "out" / "report.html").read_text()

    return run_items


def test_measurements_are_made_once_and_kept(shop, run, tmp_path):
    items = {"one": shop.item("a", "b"), "two": shop.item("b", "c")}
    status, log, first = run(**items)
    assert (status, shop.measured) == (0, ["a", "b", "c"])
    assert log[:-1] == ["measuring a", "measuring b", "measuring c"]
    assert first.count(">has b<") == 2

    status, log, second = run(**items)
    assert (status, shop.measured) == (0, ["a", "b", "c"])
    assert log == [f"the report is {tmp_path / 'out' / 'report.html'}"]
    # The reports differ in the date alone.
    date = re.compile("<dt>Written</dt>.*")
    assert date.sub("", second) == date.sub("", first)


@pytest.mark.parametrize("error", [InputError("x is 3: give 4"), KeyError("gone"), MemoryError()])
def test_a_failure_does_not_lose_the_others(shop, run, error):
    shop.broken["b"] = error
    items = {"one": shop.item("a", "b"), "two": shop.item("c"), "three": shop.item("b")}
    status, log, report = run(**items)
    assert (status, shop.measured) == (1, ["a", "c"])
    lost = [line.partition(": b: ")[0] for line in log if "not computed" in line]
    assert lost == ["one not computed", "three not computed"]
    assert "has a" in report and "has c" in report
    assert report.count("Not computed: b: ") == 2

    shop.broken.clear()
    status, _, report = run(**items)
    assert (status, shop.measured) == (0, ["a", "c", "b"])
    assert "Not computed" not in report


def test_an_item_that_cannot_be_shown_is_reported(shop, run):
    def fail(options, results):
        shop.item("a").content(options, results)
        raise RuntimeError("no such luck")

    status, log, report = run(ill=Exhibit("t", fail), well=shop.item("b"))
    assert (status, shop.measured) == (1, ["a", "b"])
    assert "ill not computed: RuntimeError: no such luck" in log
    assert "has b" in report


def test_every_run_ends_with_its_doubtful_times(shop, run, tmp_path):
    # Rates have no time; two items may share a measurement.
    rows = [{"beside": 0.45}, {"beside": 0.0}, {"alpha": 0.5}]
    shop.measure = lambda name: {"rows": rows, "tokens": 1}
    for _ in range(2):
        status, log, _ = run(one=shop.item("a"), two=shop.item("a"))
        assert status == 0
        assert log[-2].startswith(
            "Not to be relied on (1 of 2 rows): other programs used up to 45% of the processors. "
            f"Results are kept in {tmp_path}"
        )


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
        results(name, {"n": 1}, lambda: measure(name))
    return []

sys.exit(reproduce({"one": Exhibit("one", content)}, ReproduceOptions(), Path(output)))
"""


def test_a_signal_leaves_what_is_finished_and_the_same_command_resumes(shop, run, tmp_path):
    def run_stopped(deadly, number):
        given = tmp_path / "out", deadly, int(number)
        result = finished(sys.executable, "-c", STOPPED_RUN, *given)
        return result.returncode, result.stdout.split(), result.stderr

    status, measured, error = run_stopped("b", signal.SIGINT)
    assert (status, measured) == (130, ["a"])
    assert "stopped by SIGINT: what was finished is kept in" in error
    assert "Traceback" not in error
    status, measured, _ = run_stopped("d", signal.SIGKILL)
    assert (status, measured) == (-signal.SIGKILL, ["b", "c"])
    assert not (tmp_path / "out" / "report.html").exists()
    unfinished = tmp_path / "out" / "cache" / ".half.json.12345678.writing"
    unfinished.touch()
    status, *_ = run(one=shop.item(*"abcd"))
    assert not unfinished.exists()
    assert (status, shop.measured) == (0, ["d"])


# A function replaces the results.
@pytest.mark.usefixtures("unchecked")
def test_a_name_has_one_measurement_and_a_quick_run_fewer_and_others():
    assert list(running.ITEMS)[:10] == [
        *(f"table{n}" for n in range(1, 6)),
        *(f"figure{n}" for n in range(1, 6)),
    ]
    assert list(running.select(["figure2", "table1"])) == ["table1", "figure2"]

    def planned(quick):
        inputs = {}

        def note(name, its_inputs, compute):
            assert inputs.setdefault(name, its_inputs) == its_inputs
            json.dumps(its_inputs)

        for item in running.select(["all"]).values():
            item.content(ReproduceOptions(quick=quick), note)
        return inputs

    quick, full = planned(True), planned(False)
    assert quick.keys() < full.keys()
    assert all(quick[name] != full[name] for name in quick if name != "figure1")
