"""The measurement as a whole: who is asked what, and what becomes of trouble."""

import dataclasses
import json

import gin
import pytest

from spec_t5x.cli.main import main
from spec_t5x.errors import InputError
from spec_t5x.experiments.neighbours import measuring, run
from spec_t5x.experiments.neighbours.measuring import MeasurementError, measure
from spec_t5x.experiments.neighbours.methods import methods
from spec_t5x.experiments.neighbours.options import IMPLEMENTATIONS, NeighboursOptions
from spec_t5x.experiments.neighbours.process import Process
from spec_t5x.experiments.neighbours.weights import Given, sizes_with_random_weights
from spec_t5x.experiments.neighbours.worker import Worker
from spec_t5x.models import sizes
from spec_t5x.models.t5 import T5Config
from tests.experiments.neighbours.test_random_weights import GATED, TINY

pytestmark = pytest.mark.usefixtures("quick_compilation")


class InThisProcess(Process):
    """A ``Process`` without the process: all workers share what is compiled here."""

    def __init__(self, threads):
        self._worker = Worker()

    def close(self):
        pass

    def ask(self, do, **request):
        return json.loads(json.dumps(self._worker.answer({"do": do, **request})))

    def processor_seconds(self):
        return None


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(measuring, "Process", InThisProcess)
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture
def given(job, inputs, tiny_pair) -> Given:
    config = T5Config(**{**TINY, "vocab_size": 128}, **GATED)
    return Given(title="tiny", job=job, config=config, inputs=inputs)


def make_options(**changes) -> NeighboursOptions:
    values = {"repeats": 2, "gammas": (2,), "implementations": (), "settle_seconds": 0.0}
    return NeighboursOptions(**(values | changes))


def test_every_method_decodes_every_input_in_every_repeat(given, outputs):
    told = []
    options = make_options(pairs=("draft/token",))
    group = measure(given, options, told.append)
    assert [row.name for row in group.rows] == [
        "spec_t5x, plain",
        f"spec_t5x, {given.job.draft}/token, gamma 2",
    ]
    assert len(told) == measuring.num_steps(len(group.rows), options)
    assert group.num_tokens == sum(map(len, outputs))
    for row in group.rows:
        assert row.identical and row.num_tokens == group.num_tokens
        assert len(row.timings.decode) == len(row.timings.first_token) == 2
        assert len(row.timings.encoder) == 2
        assert row.alone.peak_bytes > row.alone.load_seconds > 0
    assert len(group.floor.bytes_per_second) == 2
    assert group.floor.working_set == pytest.approx(group.floor.reads.step, abs=8)


class Stubborn:
    """An implementation that answers as it is told to."""

    def __init__(self, answers):
        self._answers = answers

    def __call__(self, request):
        answer = self._answers.get(request["do"], {})
        return answer(request) if callable(answer) else answer


@pytest.fixture
def with_a_stranger(monkeypatch, given):
    """``with_a_stranger(answers)``: measures ours and one more, which gives these answers."""

    def measured(**answers):
        stranger = methods(make_options(implementations=("t5x",)), given.job)[-1]
        ours = methods(make_options(pairs=()), given.job)
        monkeypatch.setattr(measuring, "methods", lambda *_: [*ours, stranger])
        stubborn, answer = Stubborn(answers), Worker.answer

        def answered(self, request):
            about_it = stranger.name in (request.get("name"),)
            return stubborn(request) if about_it else answer(self, request)

        monkeypatch.setattr(Worker, "answer", answered)
        return measure(given, make_options(alone=False), lambda _: None).rows[-1]

    return measured


def opened(request):
    return {"version": "stranger 1", "seconds": 0.1}


def test_what_is_not_installed_is_a_row_that_says_so(with_a_stranger):
    row = with_a_stranger(open={"missing": "ModuleNotFoundError: No module named 'stranger'"})
    assert row.problem == "not installed: ModuleNotFoundError: No module named 'stranger'"
    assert row.timings is None and row.identical is None


def test_what_fails_when_it_is_tried_is_a_row_that_says_so(with_a_stranger):
    row = with_a_stranger(open=opened, decode={"error": "IndexError: list index out of range"})
    assert row.problem == (
        "T5X, temperature_sample, decode: does not run: IndexError: list index out of range"
    )


def test_other_ids_are_told_with_their_place_and_margin(with_a_stranger, inputs, outputs):
    def decode(request):
        ids = outputs[inputs.index(request["ids"])][: request["max_tokens"]]
        # At the third token of the first input it goes another way.
        changed = [*ids[:2], 9, *ids[3:]] if request["ids"] == inputs[0] else ids
        return {"seconds": 0.5, "ids": changed}

    row = with_a_stranger(open=opened, decode=decode, encode={"seconds": None})
    assert row.identical is False
    (divergence,) = row.divergences
    assert (divergence.input, divergence.position) == (0, 2)
    assert (divergence.plain_token, divergence.other_token) == (outputs[0][2], 9)
    # The target preferred its own.
    assert divergence.margin > 0
    assert row.timings.encoder is None
    # Half a second for each of three inputs.
    assert row.timings.decode == pytest.approx([1.5, 1.5])


def test_a_text_that_goes_on_differs_where_ours_ends(with_a_stranger, inputs, outputs):
    def decode(request):
        ids = outputs[inputs.index(request["ids"])][: request["max_tokens"]]
        return {"seconds": 0.5, "ids": [*ids, 9] if request["ids"] == inputs[1] else ids}

    row = with_a_stranger(open=opened, decode=decode, encode={"seconds": None})
    (divergence,) = row.divergences
    assert (divergence.input, divergence.position) == (1, len(outputs[1]))


def test_one_that_dies_on_the_way_voids_the_measurement(with_a_stranger, outputs):
    calls = []

    def decode(request):
        calls.append(request)
        if len(calls) > 3:
            return {"error": "ended with status -9"}
        return {"seconds": 0.5, "ids": outputs[0]}

    with pytest.raises(MeasurementError, match="T5X, temperature_sample, decode: .* status -9"):
        with_a_stranger(open=opened, decode=decode, encode={"seconds": None})


def test_a_draft_of_ours_that_cannot_be_had_is_refused(given):
    with pytest.raises(InputError, match="no draft 'absent'"):
        measure(given, make_options(pairs=("absent/own",)), lambda _: None)


def test_ours_must_work(given, monkeypatch):
    monkeypatch.setattr(Worker, "_decode", lambda self, **_: 1 / 0)
    with pytest.raises(MeasurementError, match="spec_t5x, plain: does not run: ZeroDivisionError"):
        measure(given, make_options(), lambda _: None)


def test_the_command_compares_a_pair(tiny_pair, tmp_path, capsys):
    data, kept = tmp_path / "pairs.tsv", tmp_path / "figures.json"
    data.write_text("x\tMy sister\ty\nx\tWir gehen\ty\n", encoding="utf-8")
    bindings = {
        "Models.target": str(tiny_pair / "target"),
        "Models.draft": str(tiny_pair / "draft"),
        "NeighboursOptions.implementations": (),
        "NeighboursOptions.gammas": (2,),
        "NeighboursOptions.alone": False,
        "GenerateOptions.max_decode_len": 12,
    }
    flags = [f"--gin.{name}={value!r}" for name, value in bindings.items()]
    arguments = ["--data", str(data), "--repeats", "1", "--json", str(kept)]
    assert main(["benchmark", "neighbours", *arguments, *flags]) == 0
    printed = capsys.readouterr().out
    assert "**target with draft**: 2 sources of" in printed
    assert printed.count("| yes |") == 2
    report = json.loads(kept.read_text(encoding="utf-8"))
    assert report["options"]["data"] == "pairs.tsv"
    assert report["machine"]["platform"] == "cpu"
    (group,) = report["groups"]
    assert [row["identical"] for row in group["rows"]] == [True, True]
    assert run.tables.full(report["groups"]) == printed.rstrip("\n")


def test_the_command_times_sizes_with_random_weights(monkeypatch, capsys):
    config = T5Config(**TINY, **GATED)
    larger = dataclasses.replace(config, num_decoder_layers=2)
    monkeypatch.setitem(sizes.SIZES, "tiny", config)
    monkeypatch.setitem(sizes.SIZES, "larger", larger)
    bindings = {
        "sizes": ("larger",),
        "draft_size": "tiny",
        "implementations": ("transformers",),
        "gammas": (2,),
        "alone": False,
        "source_len": 8,
        "target_len": 10,
        "repeats": 1,
    }
    pytest.importorskip("transformers", reason="needs transformers")
    flags = [f"--gin.NeighboursOptions.{name}={value!r}" for name, value in bindings.items()]
    assert main(["benchmark", "neighbours", *flags]) == 0
    printed = capsys.readouterr().out
    assert "**larger**: one source of 8.0 tokens, outputs of 10.0, random weights" in printed
    assert "spec_t5x, tiny, gamma 2" in printed
    # Of use nowhere: once with our gamma, once with its own.
    assert printed.count("a random assistant is never right") == 2
    assert printed.count("| yes |") == 3


def test_a_size_does_not_draft_for_itself(monkeypatch, tmp_path):
    monkeypatch.setitem(sizes.SIZES, "tiny", T5Config(**TINY, **GATED))
    options = NeighboursOptions(sizes=("tiny",), draft_size="tiny", source_len=8)
    (given,) = sizes_with_random_weights(options, tmp_path)
    assert given.job.draft is None
    assert not any(row.speculative for row in methods(options, given.job))
    assert len(given.inputs[0]) == 8 and max(given.inputs[0]) < TINY["vocab_size"]
    # It was there while it was at hand.
    assert not (tmp_path / "tiny").exists()


def test_the_rows_of_all_implementations(job):
    rows = methods(NeighboursOptions(gammas=(3, 4)), job)
    assert rows[0].name == "spec_t5x, plain" and rows[0].arguments == {}
    assert len({row.name for row in rows}) == len(rows)
    assert [row.name for row in rows if not row.exact] == ["CTranslate2, int8"]
    assisted = [row.arguments for row in rows if "assisted" in row.name]
    assert assisted == [
        {"assistant": "gamma", "gamma": 3},
        {"assistant": "gamma", "gamma": 4},
        {"assistant": "own"},
    ]
    without_copy = methods(NeighboursOptions(), dataclasses.replace(job, draft_copy=None))
    assert all(
        ("is no T5" in (row.problem or "")) == ("assisted" in row.name) for row in without_copy
    )
    alone = methods(NeighboursOptions(), dataclasses.replace(job, draft=None, draft_copy=None))
    assert not any(row.speculative for row in alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_inputs": 0}, "num_inputs is 0"),
        ({"repeats": True}, "repeats is True"),
        ({"gammas": (4, 0)}, "gamma is 0"),
        ({"threads": 10**6}, "threads is 1000000 and this process may use"),
        ({"pairs": ("copy",)}, "pair 'copy'"),
        ({"implementations": ("pytorch",)}, f"choose among {', '.join(IMPLEMENTATIONS)}"),
        ({"sizes": ("t5_1_1_small",), "data": "x"}, "random weights read no text"),
        ({"sizes": ("t5_1_1_small",), "pairs": ("copy/own",)}, "sizes have draft_size"),
        ({"sizes": ("byt5_small",)}, "choose a draft of its family"),
        ({"sizes": ("t5_9",)}, "no T5 size is called 't5_9'"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"settle_seconds": -1.0}, "settle_seconds is -1.0"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        NeighboursOptions(**changes)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("GenerateOptions.temperature=1.0", "temperature is 1.0"),
        ("GenerateOptions.batch_size=2", "batch_size is 2"),
        ("Models.adaptive=0.1", "adaptive is 0.1"),
        ("Models.target='lm-target'", "target lm-target is a decoder alone"),
    ],
)
def test_settings_that_not_everybody_has_are_refused(binding, message, capsys):
    assert main(["benchmark", "neighbours", f"--gin.{binding}"]) == 2
    assert message in capsys.readouterr().err
