"""Lines of a shard have the texts of ``generate``, in any batches."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.generation import Answer, GenerateOptions, Generator
from spec_t5x.generation.batches import random_keys
from spec_t5x.generation.engine import Engine
from spec_t5x.inference.answering import Answerer, Learned, Tally, line_of
from spec_t5x.inference.sources import Item
from spec_t5x.loops import refill
from spec_t5x.loops.pace import Costs
from spec_t5x.types import EOS_ID

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TEXTS = ["a green bird", "My sister reads", "Es regnet", "a", "the garden", "We are", "cat"]
OPTIONS = GenerateOptions(gamma=3, max_decode_len=16, batch_size=2, seed=5)


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


def items(first: int = 0) -> list[Item]:
    return [
        Item(index=first + n, place=("line", first + n + 1), text=text)
        for n, text in enumerate(TEXTS)
    ]


def lines_of(generator, options, some: list[Item], progress=lambda tally: None) -> list[bytes]:
    answerer = Answerer(generator=generator, options=options)
    ((_, lines),) = answerer.shards([(0, some)], progress)
    return lines


@pytest.mark.parametrize(
    "change", [{"temperature": 1.0, "num_decodes": 2}, {"beams": 2, "num_decodes": 2}]
)
def test_lines_have_the_texts_of_generate_at_any_batch_size(generator, change):
    """Texts are the same in slots or alone, and with any other inputs."""
    options, tally = dataclasses.replace(OPTIONS, **change), Tally()
    one = lines_of(generator, dataclasses.replace(options, batch_size=1), items(), tally.add)
    found, expected = list(map(json.loads, one)), list(generator.generate(TEXTS, options))
    for line, outputs in zip(found, expected, strict=True):
        decodes = line.get("decodes", [line])
        assert [decode["output_ids"] for decode in decodes] == [o.output_ids for o in outputs]
    assert [line["input"] for line in found] == TEXTS
    assert (tally.inputs, tally.errors) == (len(TEXTS), 0)
    assert tally.tokens == sum(len(o.output_ids) for e in expected for o in e)
    counted = [o for e in expected for o in (e[:1] if options.beams else e)]
    assert tally.target_calls == sum(o.target_calls for o in counted)
    advance = sum(o.target_calls * o.block_efficiency for o in counted)
    assert tally.block_efficiency == pytest.approx(advance / tally.target_calls)
    # The rows of an input are in each call until its last one has ended; a search's are one.
    rows = 1 if options.beams else 2
    assert tally.row_calls == rows * sum(max(o.target_calls for o in e) for e in expected)
    both = Tally()
    lines_of(generator, options, items()[:2], both.add)
    longest = max(o.target_calls for e in expected[:2] for o in e)
    assert both.row_calls == rows * options.batch_size * longest
    if not options.beams:
        in_slots = Tally()
        three = dataclasses.replace(options, batch_size=3)
        assert lines_of(generator, three, items(), in_slots.add) == one
        assert 0.5 < in_slots.occupancy <= 1
        assert lines_of(generator, options, items()[2:]) == one[2:]


@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "block"), (1.0, "coupled")])
def test_with_auto_the_pace_decides_where_texts_do_not_depend_on_it(
    generator, temperature, verifier
):
    options = dataclasses.replace(OPTIONS, gamma="auto", temperature=temperature, verifier=verifier)
    generator.assume(options, Costs.by_formula(c=0.1))
    answerer = Answerer(generator=generator, options=options)
    learned = answerer.learned(items())
    assert learned.gamma is None
    answerer.assume(learned)
    assert answerer.options.gamma == "auto"


def test_with_auto_a_shards_lines_depend_on_no_other_shard(generator):
    options, own = dataclasses.replace(OPTIONS, gamma="auto"), dataclasses.replace(generator)
    own.assume(options, Costs.by_formula(c=0.1))
    later = items(len(TEXTS))
    both = dict(Answerer(generator=own, options=options).shards([(0, items()), (1, later)]))
    assert both[1] == lines_of(own, options, later)


def test_a_prefix_is_no_generated_token(generator):
    options, tally = dataclasses.replace(OPTIONS, output_prefix="Der"), Tally()
    lines = lines_of(generator.plain(), options, items()[:2], tally.add)
    given = len(generator.prefix_ids(options))
    assert tally.tokens == sum(len(json.loads(line)["output_ids"]) - given for line in lines)
    # A plain output has no block efficiency, which counts as 1.
    assert tally.block_efficiency == 1.0


@pytest.mark.parametrize("c", [0.01, 3.0])
def test_with_auto_a_sampled_text_depends_on_nothing_beside_it(generator, c):
    """The number of drafts is decided once for all of a run."""
    options = dataclasses.replace(OPTIONS, gamma="auto", temperature=1.0)
    own = dataclasses.replace(generator)
    own.assume(options, Costs.by_formula(c=c))
    learned = Answerer(generator=own, options=options).learned(items())
    assert (learned.gamma == 0) == (c > 1)
    found = []
    for size in (1, 3):
        sized = dataclasses.replace(options, batch_size=size)
        answerer = Answerer(generator=dataclasses.replace(generator), options=sized)
        answerer.assume(learned)
        # A draft that is not asked needs no prefill, and outputs have no counts of it.
        assert (answerer.generator.draft is None) == (c > 1)
        found.append(lines_of(answerer.generator, answerer.options, items()))
    assert found[0] == found[1]


def test_the_decoding_that_gamma_is_learned_by_shares_no_random_number_with_the_run(
    generator, monkeypatch
):
    """Shared numbers would make a draft that both accept likelier than it is by its law."""
    options = dataclasses.replace(OPTIONS, gamma="auto", temperature=1.0)
    generator.assume(options, Costs.by_formula(c=0.1))
    decode, used = Engine.decode, []

    def recorded(self, batch):
        used.append(jax.random.key_data(batch.keys))
        return decode(self, batch)

    monkeypatch.setattr(Engine, "decode", recorded)
    Answerer(generator=generator, options=options).learned(items())
    ((*keys,),) = used
    of_run = jax.random.key_data(random_keys(options.seed, np.arange(len(TEXTS))))
    assert not {tuple(each.tolist()) for each in keys} & {tuple(each.tolist()) for each in of_run}


def test_an_example_with_an_id_that_the_model_lacks(generator):
    item = Item(index=0, place=("example", 0), text="x", ids=[3, generator.target.vocab_size])
    with pytest.raises(InputError, match="give a task with the model's vocabulary"):
        Answerer(generator=generator, options=OPTIONS).ids(item)


@pytest.mark.parametrize(
    ("change", "gamma"),
    [
        ({"max_decode_len": 4}, 8),
        ({"verifier": "tree", "widths": (4, 4, 4)}, 2),
        ({"verifier": "tree", "widths": (4, 4, 4)}, 0),
    ],
)
def test_a_learned_gamma_fits_all_options(generator, change, gamma):
    options = dataclasses.replace(OPTIONS, gamma="auto", temperature=1.0, **change)
    answerer = Answerer(generator=generator, options=options)
    answerer.assume(Learned(costs=Costs.by_formula(c=0.1), gamma=gamma))
    assert answerer.options.gamma == min(gamma, options.max_decode_len)
    lines = lines_of(answerer.generator, answerer.options, items())
    assert all(json.loads(line)["output_ids"] for line in lines)


def test_an_input_that_comes_to_no_text_is_a_line_with_the_reason(generator, monkeypatch):
    answer = Generator.answer

    def some(self, text, *decoded):
        if text == TEXTS[2]:
            return Answer(error=InputError("not finite"))
        return answer(self, text, *decoded)

    monkeypatch.setattr(Generator, "answer", some)
    tally = Tally()
    lines = lines_of(generator, OPTIONS, items(), tally.add)
    assert json.loads(lines[2]) == {"index": 2, "line": 3, "error": "not finite", "inputs": {}}
    assert (tally.inputs, tally.errors) == (len(TEXTS), 1)
    of_task = dataclasses.replace(items()[2], task="a task")
    assert json.loads(line_of(of_task, Answer(error=InputError("no"))))["task"] == "a task"


def test_ids_that_come_with_an_input_are_taken(generator):
    answerer = Answerer(generator=generator, options=OPTIONS)
    place = ("example", 0)
    item = Item(index=0, place=place, text="shown", ids=[5, 6, 1])
    assert answerer.ids(item) == [5, 6, 1]
    long = dataclasses.replace(item, ids=list(range(3, 60)))
    (line,) = lines_of(generator, OPTIONS, [long])
    assert "has 57 tokens and the encoder takes 48" in json.loads(line)["error"]
    cut = Answerer(generator=generator, options=dataclasses.replace(OPTIONS, truncate=True))
    assert cut.ids(long) == [*range(3, 50), EOS_ID]
    (line,) = lines_of(generator, OPTIONS, [dataclasses.replace(item, ids=[])])
    assert "no ids" in json.loads(line)["error"]


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            "RESOURCE_EXHAUSTED: out of memory\nallocating 5 GB",
            InputError,
            "^batch_size is 2, which does not fit .* a smaller one",
        ),
        ("INTERNAL: a kernel failed", jax.errors.JaxRuntimeError, "^INTERNAL: a kernel failed"),
    ],
)
def test_a_batch_that_does_not_fit_into_memory_is_one_line(
    generator, monkeypatch, raised, error, message
):
    def failing(*_, **__):
        raise jax.errors.JaxRuntimeError(raised)

    monkeypatch.setattr(refill, "burst", failing)
    with pytest.raises(error, match=message):
        lines_of(generator, OPTIONS, items())
