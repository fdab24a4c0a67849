"""Reports and the log of a run: a bar, ``metrics.jsonl``, and TensorBoard's curves."""

import io
import json
import types

import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.training import training_log
from spec_t5x.labs.training.training_log import MetricsFile, TrainingProgress
from tests.labs.training.toys import copy_batches, train_toy

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_a_terminal_gets_a_bar(tmp_path, caplog):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    caplog.set_level("INFO", logger="spec_t5x")
    with TrainingProgress(tmp_path, start_step=0, steps=2, stream=stream) as progress:
        progress.report(1, loss=1.5, accuracy=0.5, rate=1e-3)
        progress.count(2, tokens=10, pairs=2)
        progress.say("a line")
    assert "loss 1.5000" in stream.getvalue() and "a line" in stream.getvalue()


def test_rates_are_averages_since_the_last_report_without_pauses(tmp_path, monkeypatch):
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(training_log, "time", clock)
    figures = {"loss": 1.0, "accuracy": 0.5, "rate": 1e-3}
    with TrainingProgress(tmp_path, start_step=0, steps=9) as progress:
        progress.count(1, tokens=30, pairs=4)
        now[0] += 3
        with progress.pause():
            now[0] += 50
        progress.count(2, tokens=10, pairs=2)
        now[0] += 1
        progress.report(2, **figures)
        progress.count(3, tokens=6, pairs=1)
        now[0] += 2
        progress.report(3, **figures)
    rates = [
        (line["tokens_per_s"], line["pairs_per_s"]) for line in lines_of(tmp_path / "metrics.jsonl")
    ]
    assert rates == [(10.0, 1.5), (3.0, 0.5)]


def lines_of(path):
    return [json.loads(line) for line in path.open()]


def test_no_step_is_logged_twice_and_no_half_line_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    losses = [{"step": step, "loss": 1 / step} for step in (1, 2, 3, 4)]
    first = MetricsFile(path, 0)
    for line in losses:
        first.add(**line)
    with path.open("ab") as stream:
        stream.write(b'\0\xff\n7\n{"step": 2, "lo')
    again = MetricsFile(path, 2)
    # The line of the resumed step is there already; the others are new.
    dev = {"step": 2, "dev_loss": 0.25}
    for line in (losses[1], dev, losses[2]):
        again.add(**line)
    assert lines_of(path) == [*losses[:2], dev, losses[2]]


def test_a_log_that_finds_no_room(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.add(step=1, loss=1.0)
    disk.fill()
    with pytest.raises(InputError, match=r"cannot write .*metrics.jsonl \(File too large\): free"):
        file.add(step=2, text="x" * 5000)
    disk.clear()
    MetricsFile(path, 1).add(step=2, loss=0.5)
    assert lines_of(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_the_curves_are_those_of_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    options = {"log_period": 2, "eval_period": 4, "tensorboard": True}
    train_toy(tmp_path, 4, dev=copy_batches(), **options)
    expected = {}
    for line in lines_of(tmp_path / "metrics.jsonl"):
        step = line.pop("step")
        for name, value in line.items():
            expected.setdefault(name, {})[step] = pytest.approx(value, rel=1e-6)
    assert sorted(expected["loss"]) == [2, 4] and sorted(expected["dev_loss"]) == [4]
    assert {"accuracy", "learning_rate", "tokens_per_s", "dev_accuracy"} < set(expected)
    # All of them: its sample leaves some out.
    curves = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    curves.Reload()
    assert expected == {
        name: {each.step: float(make_ndarray(each.tensor_proto)) for each in curves.Tensors(name)}
        for name in curves.Tags()["tensors"]
    }
