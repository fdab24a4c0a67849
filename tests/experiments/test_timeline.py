"""Timelines of real runs: the loop's text, blocks in order, files that other tools read."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments import timeline
from spec_t5x.experiments.timeline import Event, Run
from spec_t5x.generation import GenerateOptions, Generator

TEXT = "It is raining and the street is wet."
OPTIONS = GenerateOptions(max_decode_len=12, verifier="token")


@pytest.fixture(scope="module")
def generator(tiny_pair, quick_compilation) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


@pytest.fixture(scope="module")
def runs(generator) -> list[Run]:
    return timeline.record(generator, TEXT, OPTIONS, gammas=(3, 0), repeats=2)


def test_runs_have_the_loops_tokens_and_calls(generator, runs):
    speculative, plain = runs
    ((expected,),) = generator.generate([TEXT], dataclasses.replace(OPTIONS, gamma=3))
    assert speculative.num_tokens == plain.num_tokens == len(expected.output_ids)
    assert speculative.target_calls == expected.target_calls
    assert plain.target_calls == plain.num_tokens > speculative.target_calls > 1
    assert [run.label for run in runs] == ["gamma 3", "standard decoding"]
    assert all(run.loop_us > 0 for run in runs)


def test_every_call_is_a_block_and_blocks_do_not_overlap(runs):
    speculative, plain = runs
    kinds = [event.kind for event in speculative.events]
    assert kinds == [
        "target encoder",
        "draft encoder",
        "prefill",
        *["draft", "draft", "draft", "target"] * speculative.target_calls,
    ]
    assert [event.kind for event in plain.events] == [
        "target encoder",
        "prefill",
        *["target"] * plain.target_calls,
    ]
    for run in runs:
        end = 0.0
        for event in run.events:
            assert event.duration_us > 0
            assert event.start_us >= end
            end = event.start_us + event.duration_us
        assert run.total_us == end
        assert sum(map(run.time_of, timeline.COLOURS)) <= end


def test_sampled_texts_are_the_loops_too(generator):
    """``record`` compares them itself."""
    counts = []
    for seed in range(4):
        options = dataclasses.replace(OPTIONS, temperature=1.0, seed=seed)
        (run,) = timeline.record(generator, TEXT, options, gammas=(3,), repeats=1)
        counts.append(run.num_tokens)
    # Some end at once; several tokens were drawn all the same.
    assert sum(counts) > 8


def test_a_draft_whose_steps_cannot_be_told_apart_is_one_block(generator):
    copying = generator.with_draft(CopyDraft(generator.target.vocab_size))
    (run,) = timeline.record(copying, TEXT, OPTIONS, gammas=(3,), repeats=1)
    drafts = [event for event in run.events if event.kind == "draft"]
    assert [event.name for event in drafts] == ["proposal of 3"] * run.target_calls


def test_another_text_than_the_loops_is_an_error(generator, monkeypatch):
    monkeypatch.setattr(timeline, "_ids", lambda state: [4, 4])
    with pytest.raises(RuntimeError, match=r"gamma 3 gave \[4, 4\], not"):
        timeline.record(generator, TEXT, OPTIONS, gammas=(3,), repeats=1)


@pytest.mark.parametrize(
    ("options", "gammas", "message"),
    [
        ({}, (), "gammas are ()"),
        ({}, (3, -1), "at least 0"),
        ({"num_decodes": 2}, (3,), "num_decodes is 2"),
        ({"beams": 2}, (3,), "beams is 2"),
        ({"verifier": "tree"}, (3,), "verifier is 'tree'"),
    ],
)
def test_what_has_no_timeline_is_refused(generator, options, gammas, message):
    with pytest.raises(InputError) as error:
        timeline.record(generator, TEXT, GenerateOptions(**options), gammas=gammas)
    assert message in str(error.value)
    with pytest.raises(InputError, match="there is no draft"):
        timeline.record(generator.plain(), TEXT, OPTIONS, gammas=(3, 0))


RUNS = [
    Run(
        gamma=2,
        events=(
            Event(
                name="encoder of the target", kind="target encoder", start_us=5.0, duration_us=10.0
            ),
            Event(name="draft step 1 (2 tokens)", kind="draft", start_us=20.5, duration_us=1.5),
            Event(name="target call (3 tokens)", kind="target", start_us=30.0, duration_us=40.0),
        ),
        num_tokens=3,
        target_calls=1,
        loop_us=50.0,
    ),
    Run(
        gamma=0,
        events=(Event(name="target call", kind="target", start_us=1.0, duration_us=20.0),),
        num_tokens=1,
        target_calls=1,
        loop_us=15.0,
    ),
]


def test_chrome_trace_is_what_perfetto_reads():
    trace = json.loads(timeline.chrome_trace(RUNS))
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "gamma 2", 2: "standard decoding"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) + len(names) + len(threads) == len(events)
    assert all(threads[e["pid"], e["tid"]] == e["cat"] for e in complete)
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in complete] == [
        (1, "target call (3 tokens)", 30, 40),
        (1, "draft step 1 (2 tokens)", 20.5, 1.5),
        (1, "encoder of the target", 5, 10),
        (2, "target call", 1, 20),
    ]


def test_svg_has_a_bar_for_each_block_and_is_the_same_for_the_same_runs():
    text = timeline.svg(RUNS)
    root = ElementTree.fromstring(text)
    assert root.get("viewBox")
    assert text == timeline.svg(RUNS)
    # Bars and a patch in the legend.
    for kind, count in {"target": 3, "draft": 2, "target encoder": 2, "prefill": 0}.items():
        assert text.count(f"fill: {timeline.COLOURS[kind]}") == count, kind


def test_runs_survive_json():
    assert [Run.from_json(json.loads(json.dumps(run.to_json()))) for run in RUNS] == RUNS
