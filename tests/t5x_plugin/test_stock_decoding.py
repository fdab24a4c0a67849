"""The baseline of ``reproduce public``: T5X's own decoding writes what our plain decoding does."""

import dataclasses
import json

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

from spec_t5x.checkpoints.loading import load
from spec_t5x.cli.main import main
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.reproduction import public_measurements, public_plan, stock_t5x
from tests import public_stand_ins
from tests.conftest import ENGLISH

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

GREEDY = GenerateOptions(max_decode_len=12, verifier="token")


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Provides the folder of ``public_stand_ins``."""
    return public_stand_ins.write(tmp_path_factory.mktemp("stand_ins"))


@pytest.fixture(scope="module")
def stored(stand_ins):
    """Provides a T5 1.0 of random weights that write varied texts, of which some end."""
    stored = load(stand_ins / "t5-base")
    embedding = stored.params["token_embedder"]["embedding"]
    ends = embedding.at[stored.vocabulary.eos_ids[0]].multiply(1.55)
    return dataclasses.replace(
        stored, params=stored.params | {"token_embedder": {"embedding": ends}}
    )


def test_greedy_texts_are_the_same(stored):
    generator = Generator.of(stored)
    (found,) = stock_t5x.measure(generator, ENGLISH[:6], GREEDY, 2)
    assert found["same_text"] == "yes"
    assert found["plain_tokens"] == found["stock_tokens"]
    ours = [tuple(one[0].output_ids) for one in generator.generate(ENGLISH[:6], GREEDY)]
    assert found["plain_tokens"] == sum(map(len, ours)) and len(set(ours)) > 2
    assert 1 < min(map(len, ours)) < max(map(len, ours)) == GREEDY.max_decode_len
    for way in ("plain", "stock"):
        assert len(found[f"{way}_seconds"]) == 2 and min(found[f"{way}_seconds"]) > 0
    assert found["speed_up"] > 0


def test_other_texts_are_counted(stored):
    """T5X has no rule against repetition."""
    options = dataclasses.replace(GREEDY, repetition_penalty=9.0)
    (found,) = stock_t5x.measure(Generator.of(stored), ENGLISH[:6], options, 1)
    assert found["same_text"].endswith(" differ")


def test_draws_are_not_compared(stored):
    options = dataclasses.replace(GREEDY, temperature=1.0)
    (found,) = stock_t5x.measure(Generator.of(stored), ENGLISH[:2], options, 1)
    assert found["same_text"] is None and found["stock_tokens"] > 0


@pytest.mark.parametrize("change", ["int8", "relpos_num_buckets", "added_rows"])
def test_what_t5x_cannot_run_has_no_row(stored, change):
    if change == "int8":
        generator = Generator.of(stored, "int8")
    else:
        config = dataclasses.replace(stored.config, **{change: 8})
        generator = Generator.of(dataclasses.replace(stored, config=config, params={}))
    assert stock_t5x.measure(generator, ENGLISH[:1], GREEDY, 1) == []


def test_the_report_has_its_rows(monkeypatch, tmp_path, stand_ins):
    for name in ("_rates", "_speed_ups", "_quality"):
        monkeypatch.setattr(public_measurements, name, lambda *_: {"tokens": 0, "rows": []})
    for module in (public_plan, public_measurements):
        monkeypatch.setattr(module, "MAX_DECODE_LEN", 8)
    pair = {"target": str(stand_ins / "t5-base"), "draft": "copy", "task": "EnDe"}
    pair |= {"data": str(stand_ins / "ende.tsv")}
    (tmp_path / "pairs.json").write_text(json.dumps([pair]), encoding="utf-8")
    command = ["reproduce", "public", "--quick", "--pairs", str(tmp_path / "pairs.json")]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    (table,) = found["items"]["public"]["content"]
    assert [row[1:4] for row in table["rows"]] == [["EnDe", stock_t5x.NAME, t] for t in (0, 1)]
    assert [row[-1] for row in table["rows"]] == ["yes", None]
