"""The closed loop of requests: both ways answer alike, and a client has one request at a time."""

import json

import jax
import pytest

from benchmarks import closed_loop, random_pair
from spec_t5x.labs.benchmark import random_models
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


@pytest.fixture
def tiny_sizes(monkeypatch):
    """Makes every published size tiny."""
    config = tiny_t5(0, vocab_size=64).config
    for module in (random_pair, random_models):
        monkeypatch.setattr(module, "size", lambda name: config)


def test_batches_and_slots_give_the_same_answers(tiny_sizes, tmp_path, capsys):
    kept = tmp_path / "closed.json"
    flags = ["--requests", "7", "--concurrency", "3", "--source_len", "8", "--max_decode_len", "12"]
    assert closed_loop.main([*flags, "--gamma", "0", "2", "--json", str(kept)]) == 0
    found = json.loads(kept.read_text())
    rows = found["rows"]
    # A CPU does not tell its memory.
    assert found["peak_memory_bytes"] is None
    assert [(row["gamma"], row["way"]) for row in rows] == [
        *((0, "batches"), (0, "slots"), (2, "batches"), (2, "slots"))
    ]
    for row in rows:
        assert row["same_outputs"] == row["requests"] == 7
        assert 7 * 3 <= row["tokens"] <= 7 * 12
        low, middle, high = row["latency_seconds"].values()
        assert 0 < low <= middle <= high <= row["seconds"]
    shown = capsys.readouterr().out
    assert "| 3         | plain   | batches |" in shown and "7 of 7" in shown


def test_a_client_sends_its_next_request_when_it_has_its_answer(tiny_sizes, monkeypatch):
    under_way, most, sent = set(), 0, []

    def send(answers, places):
        nonlocal most
        under_way.update(places)
        sent.extend(places)
        most = max(most, len(under_way))
        plain_send(answers, places)

    def receive(answers, place, tokens):
        under_way.remove(place)
        plain_receive(answers, place, tokens)

    plain_send, plain_receive = closed_loop.Answers.send, closed_loop.Answers.receive
    monkeypatch.setattr(closed_loop.Answers, "send", send)
    monkeypatch.setattr(closed_loop.Answers, "receive", receive)
    target = random_models.random_model(tiny_t5(0, vocab_size=64).config, "float32", 0)
    requests = closed_loop.Requests.drawn(target, 8, 8, 12, seed=0)
    loop = closed_loop.Loop(gamma=0, max_decode_len=12, eos_id=-1)
    answers = closed_loop.Server(target, None, 3, loop).answer_in_slots(requests, 8)
    assert most == 3
    assert sent == list(range(len(sent))) and sorted(answers.outputs) == list(range(8))


def test_too_little_memory_is_a_line_below_the_rows_so_far(tiny_sizes, monkeypatch, capsys):
    def answer(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory, trying\n to allocate")

    monkeypatch.setattr(closed_loop.Server, "answer_in_slots", answer)
    flags = ["--requests", "2", "--concurrency", "2", "--source_len", "8", "--max_decode_len", "4"]
    assert closed_loop.main([*flags, "--gamma", "0"]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("closed_loop: error: RESOURCE_EXHAUSTED: Out of memory, trying to")
    assert line.endswith(": take fewer rows, or a smaller model")
    assert "| batches |" in shown.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "concurrency is [0] and gamma [0, 4]: give at least 1 client"),
        (["--requests", "0"], "requests is 0: give at least 1"),
        (["--seed", "-1"], "seed is -1: give at least 0, at most 4294967295"),
        (["--target", "random:t5_1_1_huge"], "t5_1_1_huge"),
    ],
)
def test_a_mistake_is_told_in_a_line(flags, message, capsys):
    assert closed_loop.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("closed_loop: error: ") and message in line
