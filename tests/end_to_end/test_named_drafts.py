"""Every draft that has a name or a format runs everywhere, and the text is the target's."""

import dataclasses
import json

import pytest

from spec_t5x import registry
from spec_t5x.checkpoints.make_draft import kind_of
from spec_t5x.generation import GenerateOptions, Generator
from tests.named_drafts import SPREAD, every_named_draft, named
from tests.simulated_devices import printed_by

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TEXTS = ["a green bird sings", "My sister reads a book", "Es regnet", "cat table", "the garden"]
# Fewer at a time than there are: each is in a slot that another had, or waits for one.
OPTIONS = GenerateOptions(gamma=2, max_decode_len=12, batch_size=2)


@pytest.fixture(scope="module", params=["auto", "int8"])
def kv(request):
    """Provides the type of the source's keys and values."""
    return request.param


@pytest.fixture(scope="module")
def plain(drafts_of_pair, kv):
    """Decodes the texts with the target alone."""
    generator = Generator.load(drafts_of_pair / "target", kv=kv)
    tokens = tokens_of(generator, dataclasses.replace(OPTIONS, batch_size=len(TEXTS)))
    assert len({len(each) for each in tokens}) > 1 and len(set(map(tuple, tokens))) == len(TEXTS)
    return tokens


def tokens_of(generator, options=OPTIONS):
    return [outputs[0].output_ids for outputs in generator.generate(TEXTS, options)]


@pytest.fixture(scope="module")
def runs(drafts_of_pair, kv, tmp_path_factory):
    """Runs ``infer`` on 2 x 2 devices, with each draft, twice; and returns JAX's cache, too."""
    source = tmp_path_factory.mktemp("inputs") / "lines.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    flags = {
        "input": source,
        "model_parallel": 2,
        "gamma": OPTIONS.gamma,
        "max_decode_len": OPTIONS.max_decode_len,
        "batch_size": OPTIONS.batch_size,
        "kv": kv,
    }
    flags = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    program = "inference/every_draft_program.py", drafts_of_pair, *flags
    cache = tmp_path_factory.mktemp("cache")
    return [printed_by(*program, devices=4, cache=cache) for _ in range(2)], cache


@every_named_draft
def test_generate_writes_the_targets_text(draft, drafts_of_pair, kv, plain):
    name = named(draft, drafts_of_pair)
    generator = Generator.load(drafts_of_pair / "target", name, kv=kv)
    assert tokens_of(generator) == plain
    # Options are checked by this class before a draft is made.
    assert type(generator.draft) is registry.find("draft", kind_of(name)).draft


@pytest.mark.parametrize("draft", SPREAD)
def test_infer_on_several_devices_writes_the_targets_text_twice(draft, runs, plain):
    assert [run[draft]["tokens"] for run in runs[0]] == [plain, plain]


@pytest.mark.parametrize("draft", SPREAD)
def test_all_bursts_of_several_devices_are_one_program(draft, runs):
    assert [run[draft]["bursts"] for run in runs[0]] == [1, 1]


def test_no_program_is_read_back_in_which_devices_would_wait_for_one_another(runs):
    assert not list(runs[1].glob("*burst*"))
