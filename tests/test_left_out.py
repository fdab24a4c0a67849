"""Drafts that did not pay before: what is remembered of them, and when they are loaded."""

import dataclasses
import math
import types

import pytest

from spec_t5x.checkpoints.named_models import Models
from spec_t5x.cli.main import main
from spec_t5x.generation import GenerateOptions, Generator, generator, left_out
from spec_t5x.generation.left_out import Learned, Memory
from spec_t5x.loops.pace import TOLERANCE, Costs, Pace
from spec_t5x.tuning import costs as costs_lib

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TEXTS = ["My sister", "Wir gehen morgen.", "Der alte Tisch", "a green bird", "It is wet."]
AUTO = GenerateOptions(max_decode_len=16)
COSTS = dataclasses.replace(Costs.by_formula(c=0.3, position=0.2), step=0.01)
# 15 plain steps are 1 % of what loading takes.
DEAR = Learned(costs=COSTS, factor=0.6, rate=0.2, loading=15 * 0.01 * TOLERANCE)


@pytest.fixture(autouse=True)
def users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def models(tiny_pair) -> Models:
    return Models(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))


def texts_of(answers) -> list[str]:
    return [answer[0].output for answer in answers]


def test_a_draft_that_did_not_clearly_pay_waits_until_loading_costs_little():
    assert DEAR.plain_steps == dataclasses.replace(DEAR, factor=1.05).plain_steps == 15
    assert dataclasses.replace(DEAR, factor=1.15).plain_steps == 0
    # Where nothing was timed nothing is known.
    assert dataclasses.replace(DEAR, costs=Costs.by_formula(c=0.3)).plain_steps == 0
    assert "from an acceptance rate of about 54%, and before 20%" in DEAR.verdict
    never = dataclasses.replace(DEAR, costs=Costs.by_formula(c=1.0, position=0.1), rate=None)
    assert never.verdict.endswith("which no acceptance pays for")


def test_what_was_learned_comes_back_for_the_same_pair_and_options(models, tiny_pair):
    memory = Memory.of(models, AUTO)
    assert memory.learned is None and memory.steps_left == 0
    memory.keep(COSTS, None, 2.5)
    assert Memory.of(models, AUTO).learned == Learned(costs=COSTS, factor=0.0, loading=2.5)
    memory.keep(COSTS, Pace.start(COSTS), 0.0)
    found = Memory.of(models, AUTO).learned
    # Nothing was tried: the factor is that of the expected acceptance.
    assert found.rate is None and 1 < found.factor < 2
    for others in (
        (models, dataclasses.replace(AUTO, batch_size=2)),
        (dataclasses.replace(models, draft=str(tiny_pair / "target")), AUTO),
    ):
        assert Memory.of(*others).learned is None
    assert Memory.of(models, AUTO, DEAR).learned == DEAR


def test_only_where_drafts_do_not_choose_the_texts(models):
    for changes in ({"gamma": 2}, {"temperature": 1.0}, {"beams": 2}):
        assert Memory.of(models, dataclasses.replace(AUTO, **changes)) is None
    coupled = dataclasses.replace(AUTO, temperature=1.0, verifier="coupled")
    assert Memory.of(models, coupled) is not None
    assert Memory.of(dataclasses.replace(models, draft="none"), AUTO) is None


def test_what_was_timed_beside_other_programs_is_not_relied_on(models, monkeypatch):
    busy = dataclasses.replace(COSTS, beside=0.5)
    Memory.of(models, AUTO).keep(busy, None, 0.0)
    monkeypatch.setattr(costs_lib, "_since_import", types.SimpleNamespace(share=0.0))
    assert Memory.of(models, AUTO).learned is None
    monkeypatch.setattr(costs_lib, "_since_import", types.SimpleNamespace(share=0.5))
    assert Memory.of(models, AUTO).learned.costs == busy


def test_it_is_loaded_when_its_turn_comes_and_texts_stay(models, monkeypatch):
    made = []
    real = generator.make_draft
    monkeypatch.setattr(generator, "make_draft", lambda *args: made.append(1) or real(*args))
    memory = Memory.of(models, AUTO)
    # More than the first text takes: the draft is loaded in the middle of a call.
    memory.learned = dataclasses.replace(DEAR, loading=20 * 0.01 * TOLERANCE)
    waiting = Generator.load(models.target, models.draft, memory=memory)
    assert waiting.draft is None and not made
    plain = texts_of(waiting.plain().generate(TEXTS, AUTO))

    answers = list(waiting.generate(TEXTS[:1], AUTO))
    assert answers[0][0].proposed is None and not made
    assert waiting.run(AUTO).verdict == DEAR.verdict
    # The steps of earlier calls count.
    answers += waiting.generate(TEXTS[1:], AUTO)
    assert texts_of(answers) == plain
    drafted = [answer[0].proposed is not None for answer in answers]
    assert drafted == sorted(drafted) and 0 < sum(drafted) < len(TEXTS)
    assert made == [1]
    (last,) = waiting.generate(TEXTS[:1], AUTO)
    assert last[0].proposed is not None and made == [1]
    # What was learned since is there for the next process.
    found = Memory.of(models, AUTO).learned
    assert found.loading > waiting.program_seconds > 0 and found.rate is not None
    assert waiting.run(AUTO).verdict != DEAR.verdict


def test_a_command_does_not_load_what_the_one_before_left_out(models, monkeypatch, capfd):
    dear = dataclasses.replace(Costs.by_formula(c=1.0, position=0.1), step=1e-6)
    monkeypatch.setattr(costs_lib, "remembered", lambda *args: dear)
    flags = ("--target", models.target, "--draft", models.draft, "--max_decode_len", "16")

    def outputs() -> tuple[str, str]:
        assert main(["generate", *flags, *TEXTS]) == 0
        return capfd.readouterr()

    first = outputs()
    monkeypatch.setattr(generator, "make_draft", lambda *args: pytest.fail("loaded"))
    second = outputs()
    assert first.out == second.out
    assert "at batch size 1 an iteration takes 2.10 plain steps" in first.err
    assert "which no acceptance pays for" in second.err
    assert math.isinf(dear.needed)
    # To be shown at work it is loaded.
    with pytest.raises(pytest.fail.Exception):
        main(["generate", *flags, "--trace", TEXTS[0]])


def test_a_run_of_inference_keeps_to_what_it_began_with(models, monkeypatch, tmp_path, capfd):
    source = tmp_path / "texts.txt"
    source.write_text("\n".join(TEXTS) + "\n")
    models_flags = ("--target", models.target, "--draft", models.draft, "--max_decode_len", "16")
    flags = (*models_flags, "--input", str(source), "--batch_size", "1", "--shard_size", "3")

    def answers(name: str) -> bytes:
        output = tmp_path / name
        assert main(["infer", *flags, "--output_dir", str(output)]) == 0
        return (output / "predictions.jsonl").read_bytes()

    def know(learned) -> None:
        real = left_out.Store.load
        monkeypatch.setattr(
            left_out.Store,
            "load",
            lambda store, key, parse: (
                learned if parse == Learned.parse else real(store, key, parse)
            ),
        )

    know(None)
    drafted = answers("drafted")
    capfd.readouterr()
    know(dataclasses.replace(DEAR, loading=1.0))
    waited = answers("waited")
    assert DEAR.verdict in capfd.readouterr().err
    assert b'"proposed": null' in waited and b'"proposed": null' not in drafted
    # One of its shards is decoded again by a process that knows better.
    know(None)
    (tmp_path / "waited" / "predictions.jsonl").unlink()
    next((tmp_path / "waited").glob("*00001*")).unlink()
    assert answers("waited") == waited
