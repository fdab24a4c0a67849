"""``spec-t5x demo``: the race, and the page in a real browser."""

import dataclasses
import html
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from selenium.common.exceptions import NoSuchElementException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs import demo
from tests import quick_compilation as quick
from tests.child import HANGS
from tests.chromium import WIDTH, chromium, fits, requested
from tests.cli.results import assert_refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

REPOSITORY = Path(__file__).parents[3]
TEXT = "My sister"
OPTIONS = GenerateOptions(gamma=3, max_decode_len=16)
SAMPLED = dataclasses.replace(OPTIONS, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


@pytest.fixture
def streams(monkeypatch):
    """Collects the draft of each decode; two at once are an error."""
    begun, alone, stream = [], threading.Lock(), Generator.stream

    def recorded(self, *args, **kwargs):
        assert alone.acquire(blocking=False), "two decodes at once"
        try:
            begun.append(self.draft)
            yield from stream(self, *args, **kwargs)
        finally:
            alone.release()

    monkeypatch.setattr(Generator, "stream", recorded)
    return begun


# --- the race ------------------------------------------------------------------


def test_a_race_is_of_the_fastest_of_several_runs(generator, streams, monkeypatch):
    monkeypatch.setattr(demo, "_RUNS", 3)
    monkeypatch.setattr(demo, "_ENOUGH", 60.0)
    plain, drafted = demo.race(generator, TEXT, OPTIONS)
    assert plain[-1].generation and drafted[-1].generation
    assert streams == [None, generator.draft] * 3


def test_the_sides_are_what_generate_gives(generator):
    for options in (OPTIONS, SAMPLED):
        sides = demo.race(generator, TEXT, options)
        for events, way in zip(sides, (generator.plain(), generator), strict=True):
            ((expected,),) = way.generate(TEXT, options)
            assert events[-1].generation.output_ids == expected.output_ids
            assert events[-1].target_calls == expected.target_calls == len(events)


def test_one_race_waits_for_another_and_a_failed_one_makes_way(generator, streams):
    with pytest.raises(InputError, match="the text is empty"):
        demo.race(generator, " ", OPTIONS)
    ends = []
    threads = [
        threading.Thread(target=lambda: ends.append(demo.race(generator, TEXT, OPTIONS)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 3


def test_a_replay_shows_both_sides_by_one_clock(generator, monkeypatch):
    monkeypatch.setattr(demo, "_SHORTEST", 0.0)
    sides = demo.race(generator, TEXT, OPTIONS)
    clock, shown = [], None
    for shown in demo.replay(sides):
        clock.append(max(events[-1].seconds for events in shown if events))
    assert clock == sorted(clock)
    assert len(clock) == sum(map(len, sides))
    assert shown == sides


def test_both_sides_begin_with_the_prefix_of_outputs(generator):
    options = dataclasses.replace(OPTIONS, output_prefix="Der")
    plain, drafted = demo.race(generator, TEXT, options)
    prefix = generator.prefix_ids(options)
    shown = demo._coloured(drafted, lambda ids: generator.vocabulary.decode(prefix + ids))
    text = html.unescape(re.sub("<[^>]*>", "", shown))
    assert text == plain[-1].text and text.startswith("Der")


def test_the_verdict_says_what_the_texts_are(generator):
    plain, drafted = demo.race(generator, TEXT, OPTIONS)
    slow = [dataclasses.replace(event, seconds=2.0) for event in plain]
    fast = [dataclasses.replace(event, seconds=0.5) for event in drafted]
    said = demo.verdict((slow, fast), (1.0, 2.0), OPTIONS)
    assert said.startswith("Both texts are identical. A target call brought ")
    assert "call by call, speculative decoding was 4.00 times as fast" in said
    assert "as one program, as generate decodes, it was slower, at 0.50 of the speed." in said
    for options, expected in (
        (OPTIONS, "The texts differ"),
        (SAMPLED, "two draws from one distribution"),
        (
            dataclasses.replace(OPTIONS, verifier="token", lenience=0.5),
            "The texts differ, as the verifier is lossy.",
        ),
        (
            dataclasses.replace(SAMPLED, verifier="token", lenience=0.5),
            "draws from two distributions, as the verifier is lossy.",
        ),
        (dataclasses.replace(SAMPLED, verifier="coupled"), "The texts differ"),
    ):
        assert expected in demo.verdict((slow, fast[:-1]), (1.0, 1.0), options)


def test_the_verdict_ends_with_what_cannot_be_relied_on(generator):
    sides = tuple(
        [dataclasses.replace(event, seconds=1.0) for event in way]
        for way in demo.race(generator, TEXT, OPTIONS)
    )
    for beside, ratio, doubts in (
        (0.1, 1.0, ""),
        (0.4, 1.0, "other programs used up to 40% of the processors."),
        (0.1, 99.0, "a speed-up above the block efficiency is noise."),
    ):
        said = demo.verdict(sides, (ratio, 1.0), OPTIONS, beside=beside)
        assert said.endswith(doubts and f"Not to be relied on: {doubts}")
        assert ("Not to be relied on" in said) == bool(doubts)


def test_whole_decodes_are_timed_apart(generator, monkeypatch):
    clock = itertools.count()
    # As many runs as there may be; each takes a second.
    monkeypatch.setattr(demo.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(demo.time, "perf_counter", lambda: float(next(clock)))
    assert demo.whole(generator, TEXT, OPTIONS) == (1.0, 1.0)
    assert next(clock) == 4 * demo._RUNS


def test_what_cannot_race_is_refused(generator):
    for pair, text, expected in (
        (generator, "a" * 1001, "the text has 1001 characters and the page takes 1000"),
        (generator.plain(), TEXT, "no draft to compare with"),
    ):
        with pytest.raises(InputError, match=expected):
            demo.race(pair, text, OPTIONS)


# --- the command ---------------------------------------------------------------


def free_port() -> int:
    """Returns a free port, below the ephemeral ports."""

    def is_free(port: int) -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", port)) != 0

    return next(filter(is_free, itertools.count(20_000 + os.getpid() % 10_000)))


def test_a_port_that_is_taken_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert_refused(run("demo", "--port", port), f"--port is {port}", "give another")


def test_a_host_that_cannot_be_is_refused_before_models_are_loaded(run, monkeypatch):
    monkeypatch.setattr(Generator, "open", lambda *_: pytest.fail("models were opened"))
    assert_refused(run("demo", "--host", "300.1.1.1"), "cannot be used at 300.1.1.1")


@pytest.mark.parametrize(
    ("flags", "gamma"),
    [
        ((), 4),
        (("--gin.GenerateOptions.max_decode_len=9",), 4),
        (("--gamma", "auto"), "auto"),
        (("--gin.GenerateOptions.gamma=auto",), "auto"),
        (("--gin.GenerateOptions.gamma=2",), 2),
        (("--gin.GenerateOptions.gamma=auto", "--gamma", "3"), 3),
    ],
)
def test_gamma_is_4_unless_one_is_given(run, monkeypatch, flags, gamma):
    def opened(models, drafts, options):
        raise InputError(f"gamma is {options.gamma!r}")

    monkeypatch.setattr(Generator, "open", opened)
    assert_refused(run("demo", "--port", 0, *flags), f"gamma is {gamma!r}")


@pytest.mark.parametrize("port", [99999, -1])
def test_a_port_that_cannot_be_is_refused(run, monkeypatch, port):
    monkeypatch.setattr(demo, "page", lambda *_: pytest.fail("the page was made"))
    assert_refused(run("demo", "--port", port), f"--port is {port}: give one from 0 to 65535")


# --- the page ------------------------------------------------------------------

# Tests that run in a shell's background have SIGINT ignored, and so would the command.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from spec_t5x.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def address(tiny_pair, kept_programs):
    """Provides the address of the tiny pair's page, the only output; Ctrl-C ends the page."""
    port = free_port()
    # Quiet, because a slow machine also reports what it loads.
    command = [sys.executable, "-c", PROGRAM, "demo", "-q", "--port", str(port)]
    command += ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    environment = {
        **os.environ,
        **quick.ENVIRONMENT,
        "PYTHONPATH": str(REPOSITORY),
        "JAX_COMPILATION_CACHE_DIR": kept_programs,
    }
    with subprocess.Popen(
        [*command, "--gamma", "3", "--max_decode_len", "16"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            found = process.stdout.readline().strip()
            assert found == f"http://127.0.0.1:{port}/", process.stderr.read()
            yield found
        finally:
            process.send_signal(signal.SIGINT)
            try:
                rest = process.communicate(timeout=HANGS)
            finally:
                # A process that does not end would be waited for.
                process.kill()
    assert (process.returncode, rest) == (0, ("", ""))


def test_it_takes_no_files(address):
    form = b"--x\r\nContent-Disposition: form-data; name=files; filename=a\r\n\r\na\r\n--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    upload = urllib.request.Request(f"{address}gradio_api/upload", form, kind)
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(upload)


@pytest.mark.parametrize(
    ("name", "status"),
    [("evil.example", 400), ("localhost:7860", 200), ("x-7860.colab.googleusercontent.com", 200)],
)
def test_pages_of_other_names_cannot_read_it(address, name, status):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc)
    connection.request("GET", "/", headers={"Host": name})
    assert connection.getresponse().status == status


@pytest.fixture(scope="module")
def browser(address, tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        driver.get(address)
        waiting(driver).until(lambda _: driver.find_elements(By.CSS_SELECTOR, "#start"))
        yield driver


def waiting(browser) -> WebDriverWait:
    return WebDriverWait(browser, HANGS, 0.1, [NoSuchElementException])


def send(browser, text: str) -> str:
    """Types the text, starts the race, waits for what the page says of it."""
    box = browser.find_element(By.CSS_SELECTOR, "#text textarea")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.DELETE)
    box.send_keys(text)
    before = said(browser)
    browser.find_element(By.CSS_SELECTOR, "#start").click()
    waiting(browser).until(lambda _: said(browser) != before)
    waiting(browser).until(lambda _: not said(browser).endswith("…"))
    return said(browser)


def said(browser) -> str:
    # At one go: the element is replaced during the race.
    return browser.execute_script("return document.querySelector('.verdict')?.textContent ?? ''")


def texts(browser) -> list[str]:
    found = browser.find_elements(By.CSS_SELECTOR, ".side .text")
    return [element.get_property("textContent") for element in found]


def calls(browser) -> list[str]:
    found = browser.find_elements(By.CSS_SELECTOR, ".calls div")
    return [element.get_attribute("title") for element in found]


def test_both_sides_write_one_text(browser, generator):
    assert "Both texts are identical" in send(browser, TEXT)
    ((expected,),) = generator.generate(TEXT, OPTIONS)
    # The browser shows runs of spaces as they are.
    assert texts(browser) == [expected.output, expected.output]
    assert len(calls(browser)) == expected.target_calls
    marks = browser.find_elements(By.CSS_SELECTOR, ".text mark.accepted, .text mark.corrected")
    assert len({mark.value_of_css_property("background-color") for mark in marks}) == 2
    figures = [side.text for side in browser.find_elements(By.CSS_SELECTOR, ".side span")]
    assert figures[1] == f"{len(expected.output_ids)} target calls"
    assert figures[4] == f"{expected.target_calls} target calls"


def test_a_slider_changes_what_is_drafted(browser):
    send(browser, TEXT)
    assert all(title.endswith("of 3 proposals accepted") for title in calls(browser))
    slider = browser.find_element(By.CSS_SELECTOR, "#gamma input[type=range]")
    slider.send_keys(Keys.ARROW_LEFT)
    before = texts(browser)
    send(browser, TEXT + " ")
    assert {re.search(r"of (\d)", title)[1] for title in calls(browser)} == {"2"}
    assert texts(browser) == before
    slider.send_keys(Keys.ARROW_RIGHT)


def test_bad_texts_are_errors_on_the_page_and_good_ones_go_on(browser):
    assert "the text is empty" in send(browser, "")
    assert "1001 characters and the page takes 1000" in send(browser, "a" * 1001)
    assert browser.find_element(By.CSS_SELECTOR, "[role=alert]").is_displayed()
    assert texts(browser) == ["", ""]
    assert "and the encoder takes 48" in send(browser, "Es regnet. " * 20)
    assert "identical" in send(browser, "a green bird")


@pytest.mark.parametrize("width", [WIDTH, 400])
def test_it_fits_the_window(browser, width, tmp_path):
    assert fits(browser, width)
    assert browser.save_screenshot(str(tmp_path / "page.png"))


def test_it_asks_nobody_else_for_anything(browser, address):
    asked = requested(browser)
    assert asked
    assert [url for url in asked if not url.startswith(address)] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_it_keeps_no_history_of_runs(address):
    with urllib.request.urlopen(f"{address}config", timeout=HANGS) as answer:
        assert json.load(answer)["run_history"] is False
