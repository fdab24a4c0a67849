"""A run is planned, computed part by part, stopped, taken up again, and survives failures."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction.cache import Cache
from spec_t5x.experiments.reproduction.items import Item, Part, Setting
from spec_t5x.experiments.reproduction.run import Request, listing, reproduce
from spec_t5x.experiments.reproduction.runner import duration, make_plan, one_line
from spec_t5x.experiments.reproduction.sections import Section

REPOSITORY = Path(__file__).parents[3]


class Workshop:
    """Items whose parts note that they are computed."""

    def __init__(self):
        self.computed: list[str] = []
        # Part name to what it raises.
        self.broken: dict[str, BaseException] = {}

    def part(self, name: str, seconds: float = 60.0, version: int = 1) -> Part:
        def compute(report):
            report(0.5)
            if name in self.broken:
                raise self.broken[name]
            self.computed.append(name)
            return {"name": name, "tokens": 10}

        return Part(name=name, inputs={"version": version}, seconds=seconds, compute=compute)

    def item(self, name: str, *parts: str, borrowed: tuple[str, ...] = (), **kwargs) -> Item:
        def render(setting, done):
            return Section(title=name, paragraphs=(f"{name} has {', '.join(done)}.",))

        return Item(
            name=name,
            title=name,
            parts=lambda setting: [self.part(p) for p in parts],
            borrowed=lambda setting: [self.part(p) for p in borrowed],
            render=kwargs.pop("render", render),
            **kwargs,
        )


@pytest.fixture
def shop():
    return Workshop()


@pytest.fixture
def run(tmp_path):
    """``run(*items)``: exit status and what was said."""

    def run_items(*items, **kwargs):
        stream = io.StringIO()
        request = Request(items=items, setting=Setting(), output=tmp_path / "out", **kwargs)
        return reproduce(request, stream), stream.getvalue()

    return run_items


def report_of(tmp_path) -> str:
    return (tmp_path / "out" / "report.md").read_text()


def test_parts_are_computed_once_and_kept(shop, run, tmp_path):
    items = shop.item("one", "a", "b"), shop.item("two", "b", "c")
    status, said = run(*items)
    assert (status, shop.computed) == (0, ["a", "b", "c"])
    assert "the full run takes about 3 min: 0 of 3 parts are kept from earlier" in said
    assert "[2/3] b, about 60 s" in said
    first = report_of(tmp_path)
    assert "one has a, b." in first and "two has b, c." in first

    status, said = run(*items)
    assert (status, shop.computed) == (0, ["a", "b", "c"])
    assert "all 3 parts are kept from earlier: this takes a moment" in said
    # But for the counts and the date, the same report.
    changing = re.compile(r"^- (Parts|Written): .*$", re.MULTILINE)
    assert changing.sub("", report_of(tmp_path)) == changing.sub("", first)

    run(*items, fresh=True)
    assert shop.computed == ["a", "b", "c"] * 2


def test_new_inputs_are_computed_and_the_rest_is_kept(shop, run):
    run(shop.item("one", "a", "b"))
    newer = Item(
        name="one",
        title="one",
        parts=lambda setting: [shop.part("a"), shop.part("b", version=2, seconds=400)],
        render=shop.item("one").render,
    )
    _, said = run(newer)
    assert shop.computed == ["a", "b", "b"]
    assert "takes about 7 min: 1 of 2 parts are kept from earlier" in said


@pytest.mark.parametrize("error", [InputError("x is 3: give 4"), KeyError("gone"), MemoryError()])
def test_a_part_that_fails_does_not_lose_the_others(shop, run, tmp_path, error):
    shop.broken["b"] = error
    items = shop.item("one", "a", "b"), shop.item("two", "c"), shop.item("three", "b")
    status, said = run(*items)
    assert (status, shop.computed) == (1, ["a", "c"])
    reason = one_line(error)
    assert f"not computed: b: {reason}" in said
    report = report_of(tmp_path)
    assert "one has a." in report and "two has c." in report
    assert report.count("**Not computed:** b: ") == 2
    html = (tmp_path / "out" / "report.html").read_text()
    assert "Not computed: b: " in html and "◐" in html

    # Mended, the rest is computed and all is well.
    shop.broken.clear()
    status, _ = run(*items)
    assert (status, shop.computed) == (0, ["a", "c", "b"])
    assert "Not computed" not in report_of(tmp_path)


def test_the_reason_tells_the_kind_of_error_that_is_not_the_users():
    assert one_line(InputError("x is 3: give 4")) == "x is 3: give 4"
    assert one_line(KeyError("gone")) == "KeyError: 'gone'"
    assert one_line(RuntimeError("two\nlines")) == "RuntimeError: two lines"


def test_an_item_that_cannot_be_planned_or_rendered_is_reported(shop, run, tmp_path):
    def fail(*_):
        raise RuntimeError("no such luck")

    unplanned = Item(name="unplanned", title="unplanned", parts=fail, render=fail)
    unrendered = shop.item("unrendered", "a", render=fail)
    status, said = run(unplanned, unrendered, shop.item("well", "b"))
    assert (status, shop.computed) == (1, ["a", "b"])
    for name in ("unplanned", "unrendered"):
        assert f"{name} not computed: RuntimeError: no such luck" in said
    assert "well has b." in report_of(tmp_path)


def test_what_this_machine_cannot_is_no_failure(shop, run, tmp_path):
    absent = shop.item("absent", "z", unavailable=lambda setting: "the package x is missing")
    status, said = run(absent, shop.item("one", "a"))
    assert (status, shop.computed) == (0, ["a"])
    assert "absent not computed: the package x is missing" in said
    assert "Not computed:** the package x is missing" in report_of(tmp_path)


def test_borrowed_parts_are_shown_but_not_computed(shop, run, tmp_path):
    curve = shop.item("curve", borrowed=("b",))
    status, said = run(curve)
    assert (status, shop.computed) == (0, [])
    assert "closed forms alone" in said
    assert "curve has ." in report_of(tmp_path)
    run(shop.item("one", "b"))
    run(curve)
    assert shop.computed == ["b"]
    assert "curve has b." in report_of(tmp_path)
    # In one run with the item that owns it.
    run(curve, shop.item("one", "b"), fresh=True)
    assert "curve has b." in report_of(tmp_path)
    # Its failure is the owner's.
    shop.broken["b"] = InputError("gone")
    run(curve, shop.item("one", "b"), fresh=True)
    assert report_of(tmp_path).count("**Not computed:**") == 1


def test_a_damaged_file_is_computed_again_and_said(shop, run, tmp_path):
    item = shop.item("one", "a", "b")
    run(item)
    (path,) = [
        file
        for file in (tmp_path / "out" / "cache").iterdir()
        if json.loads(file.read_text())["identity"]["part"] == "a"
    ]
    path.write_text(path.read_text()[:40])
    status, said = run(item)
    assert (status, shop.computed) == (0, ["a", "b", "a"])
    assert f"what was kept of a is not used: {path.name} cannot be read" in said


# Runs the parts a to d; in the one named on its command line, it sends itself a signal.
STOPPED_RUN = """
import os, sys
from pathlib import Path
from spec_t5x.experiments.reproduction.items import Item, Part, Setting
from spec_t5x.experiments.reproduction.run import Request, reproduce

output, deadly, number = sys.argv[1:]

def part(name):
    def compute(report):
        if name == deadly:
            os.kill(os.getpid(), int(number))
            while True:
                pass
        print(name, flush=True)
        return {}
    return Part(name=name, inputs={"version": 1}, seconds=1.0, compute=compute)

parts = [part(name) for name in "abcd"]
item = Item(name="one", title="one", parts=lambda setting: parts, render=None)
request = Request(items=[item], setting=Setting(), output=Path(output))
sys.exit(reproduce(request, sys.stderr))
"""


def test_a_signal_leaves_what_is_finished_and_the_same_command_goes_on(shop, run, tmp_path):
    def run_stopped(deadly, number):
        output = str(tmp_path / "out")
        result = subprocess.run(
            [sys.executable, "-c", STOPPED_RUN, output, deadly, str(int(number))],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return result.returncode, result.stdout.split(), result.stderr

    status, computed, said = run_stopped("b", signal.SIGINT)
    assert (status, computed) == (130, ["a"])
    assert "stopped by SIGINT: what was finished is kept in" in said
    assert "Traceback" not in said
    status, computed, _ = run_stopped("d", signal.SIGKILL)
    assert (status, computed) == (-signal.SIGKILL, ["b", "c"])
    assert not (tmp_path / "out" / "report.html").exists()
    status, said = run(shop.item("one", *"abcd"))
    assert (status, shop.computed) == (0, ["d"])
    assert "3 of 4 parts are kept from earlier" in said
    assert (tmp_path / "out" / "report.html").exists()


def test_one_name_stands_for_one_part(shop, tmp_path):
    other = Item(
        name="other",
        title="other",
        parts=lambda setting: [shop.part("a", version=2)],
        render=shop.item("one").render,
    )
    with pytest.raises(ValueError, match="two parts named a have different inputs"):
        make_plan([shop.item("one", "a"), other], Setting(), Cache(tmp_path, {}))


def test_durations_are_told_as_people_do():
    told = [duration(seconds) for seconds in (0.2, 40, 89, 91, 2880, 4200, 9000)]
    assert told == ["1 s", "40 s", "89 s", "2 min", "48 min", "70 min", "2 h 30 min"]


def test_the_list_says_what_there_is_and_how_long_it_takes(shop):
    def fail(setting):
        raise InputError("no data")

    items = (
        shop.item("one", "a", "b"),
        shop.item("curve"),
        shop.item("absent", unavailable=lambda setting: "no TPU compiler"),
        Item(name="broken", title="broken", parts=fail, render=fail),
    )
    assert listing(items, Setting()).splitlines() == [
        "one     one (about 2 min)",
        "curve   curve (a moment)",
        "absent  absent (not on this machine: no TPU compiler)",
        "broken  broken (cannot be computed: no data)",
    ]


def test_a_directory_that_cannot_be_written_is_refused_beforehand(shop, tmp_path):
    (tmp_path / "file").touch()
    request = Request(
        items=[shop.item("one", "a")], setting=Setting(), output=tmp_path / "file" / "out"
    )
    with pytest.raises(InputError, match="cannot write to --output .*: give another"):
        reproduce(request, io.StringIO())
    assert shop.computed == []
