"""Batch after batch: slots, paces and the costs of a draft."""

import dataclasses
import functools
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.generation import GenerateOptions, Generator, engine
from spec_t5x.generation import generator as generator_lib
from spec_t5x.labs.benchmark.comparison import compare, without_open
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.loops.pace import Costs, Pace
from tests.checkpoints.faults import message_of
from tests.generation.cases import ENDS, GREEDY, LONGER, TEXTS, assert_same, options, texts_of

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_with_auto_texts_are_the_same_and_acceptance_is_remembered(generator, greedy_alone):
    auto = options(gamma="auto", batch_size=2)
    assert GenerateOptions().gamma == "auto"
    for _ in range(2):
        assert texts_of(generator.generate(TEXTS, auto)) == [
            greedy_alone[text][0].output for text in TEXTS
        ]
    first = generator._paces[engine.costly(auto)]
    list(generator.generate(TEXTS, auto))
    assert int(generator._paces[engine.costly(auto)].iterations) > int(first.iterations) > 0
    # Where texts are draws, a call depends on nothing that came before it.
    sampled = options(gamma="auto", batch_size=2, temperature=1.0)
    twice = [texts_of(generator.generate(TEXTS, sampled)) for _ in range(2)]
    assert twice[0] == twice[1]


@pytest.mark.usefixtures("unchecked")
def test_a_wider_batch_ends_the_slots_and_begins_new_ones(generator, greedy_alone, monkeypatch):
    made, slots = [], engine._Slots
    monkeypatch.setattr(generator_lib, "_SORTED", 1)
    monkeypatch.setattr(engine, "_Slots", lambda *given: made.append(given) or slots(*given))
    texts = [*TEXTS[:4], LONGER, TEXTS[4], ENDS]
    expected = [greedy_alone[text] for text in texts]
    assert_same(generator.generate(texts, GREEDY, batch_size=2), expected)
    assert len(made) == 2
    auto = generator.generate(texts, GREEDY, batch_size=2, gamma="auto")
    assert texts_of(auto) == texts_of(expected) and len(made) == 4
    # A batch that no other follows needs none.
    assert_same(generator.generate(texts[:2], GREEDY, batch_size=2), expected[:2])
    assert len(made) == 4


def test_slots_take_no_wider_prompts(generator):
    (batch,) = text_batches(generator, TEXTS[:1], options(output_prefix="a"))
    takes = functools.partial(engine._Slots.takes, types.SimpleNamespace(_first=batch))
    wider = np.pad(batch.prompts, ((0, 0), (0, 16)))
    assert takes(batch) and not takes(dataclasses.replace(batch, prompts=wider))


def test_the_costs_are_of_as_many_drafts_as_may_pay(generator, monkeypatch):
    measured = []
    monkeypatch.setattr(engine.costs_lib, "remembered", lambda key, measure, store: measure()[0])
    monkeypatch.setattr(
        engine.costs_lib,
        "measure",
        lambda *given: (measured.append(given[-1].gamma), (Costs.by_formula(c=0.1), False))[1],
    )
    for draft in (generator.draft, CopyDraft(generator.target.vocab_size)):
        which = generator.with_draft(draft)
        (batch,) = text_batches(which, TEXTS[:1], GREEDY)
        which.engine(options(gamma="auto")).costs(batch)
    assert measured == [8, 16]


def test_requests_of_many_seeds_and_stops_share_costs_and_one_pace(generator):
    """A service keeps nothing for each request, and what one has learned serves the next."""
    which, coupled = dataclasses.replace(generator), options(gamma="auto", verifier="coupled")
    steps = []
    for seed, temperature in enumerate((0.7, 1.0, 1.3)):
        own = {"seed": seed, "temperature": temperature, "stop": f"{seed}"}
        list(which.generate(TEXTS[:1], coupled, **own))
        (pace,) = which._paces.values()
        steps.append(int(pace.plain_steps + pace.iterations))
    assert steps == sorted(set(steps)) and len(which._costs) == 1
    # The pace is of gamma "auto" alone.
    (answer,) = which.generate(TEXTS[:1], coupled, gamma=3, temperature=1.0)
    (alone,) = dataclasses.replace(generator).generate(TEXTS[:1], coupled, gamma=3, temperature=1.0)
    assert list(answer) == list(alone)
    assert which.verdict(dataclasses.replace(coupled, gamma=3, temperature=1.0)) is None


def test_where_no_acceptance_pays_the_draft_is_left_out(generator):
    which = dataclasses.replace(generator)
    auto = without_open(options(gamma="auto", batch_size=2), which.defaults)
    which.assume(auto, Costs.by_formula(c=1.0, position=0.1))
    comparison = compare(which, TEXTS[:3], auto, repeats=1)
    assert (comparison.gamma, comparison.alpha, comparison.acceptance_rate) == (0, None, None)
    assert comparison.block_efficiency == comparison.predicted == 1.0
    assert comparison.identical and not comparison.divergences
    assert comparison.outputs == list(which.plain().generate(TEXTS[:3], auto))
    assert comparison.outputs == list(which.generate(TEXTS[:3], auto))
    for said in (comparison.left_out, which.verdict(auto)):
        assert "which no acceptance pays for" in said
    # A draft that was asked for is not left out.
    assert which.verdict(dataclasses.replace(auto, gamma=3)) is None
    json.dumps(comparison.to_dict())


@pytest.mark.parametrize(
    ("plain_steps", "iterations", "first_drafts", "said"),
    [
        (79, 21, (0, 20), None),
        (80, 20, (7, 20), " of 80% of the steps: {pays}"),
        (80, 20, (6, 20), " of 80% of the steps: {pays}, and 30% of its first tokens saved a step"),
        (90, 10, (0, 0), " of 90% of the steps: {pays}"),
        (9, 0, (0, 0), ": {pays}"),
    ],
)
def test_a_draft_that_was_left_out_of_most_steps_is_told(
    generator, plain_steps, iterations, first_drafts, said
):
    auto, own = options(gamma="auto", batch_size=2), dataclasses.replace(generator)
    assert own.verdict(auto) is None
    # At gamma 1 an iteration costs 1.3, which (1 + 0.33) tokens pay for by the margin of 2 %.
    own.assume(auto, costs := Costs.by_formula(c=0.3))
    pays = "it pays here from an acceptance rate of about 33%"
    decoding, pace = own.engine(auto), Pace.start(costs)
    assert decoding.verdict is None
    decoding.pace = pace.replace(
        plain_steps=jnp.int32(plain_steps),
        iterations=jnp.int32(iterations),
        counts=pace.counts.at[:2, 0].set(jnp.array(first_drafts, jnp.float32)),
    )
    expected = said and "the draft was left out" + said.format(pays=pays)
    assert decoding.verdict == expected


def test_a_batch_is_read_once_the_next_one_is_under_way(generator, monkeypatch):
    happened, decode, answer = [], Generator.decode, Generator.answer

    def noted(name, function):
        def call(self, what, *rest):
            happened.append((name, what if isinstance(what, str) else what.texts[0]))
            return function(self, what, *rest)

        return call

    monkeypatch.setattr(Generator, "decode", noted("decode", decode))
    monkeypatch.setattr(Generator, "answer", noted("answer", answer))
    list(generator.generate(TEXTS[:3], GREEDY))
    order = [
        ("decode", 0),
        ("decode", 1),
        ("answer", 0),
        ("decode", 2),
        ("answer", 1),
        ("answer", 2),
    ]
    assert happened == [(name, TEXTS[n]) for name, n in order]


def test_assumed_costs_replace_those_of_earlier_calls(generator):
    own, options = dataclasses.replace(generator), dataclasses.replace(GREEDY, gamma="auto")
    proposed = []
    for c in (0.01, 3.0):
        own.assume(options, Costs.by_formula(c=c))
        proposed.append(sum(answer[0].proposed or 0 for answer in own.generate(TEXTS, options)))
    assert proposed[0] > 0 and proposed[1] == 0
    (batch,) = text_batches(own, TEXTS[:1], options)
    message = message_of(own.plain().engine(options).costs, batch)
    assert message == "there is no draft whose costs could be measured: give one"


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_draft_that_does_not_fit_is_refused_with_and_without_slots(generator, batch_size):
    ask = options(batch_size=batch_size, verifier="tree")
    answers = generator.with_draft(CopyDraft(generator.target.vocab_size)).generate(TEXTS, ask)
    assert "CopyDraft has no propose_tree" in message_of(list, answers)


def test_what_a_search_leaves_out_is_said(generator):
    assert "a beam search drafts if gamma is a number" in generator.verdict(
        options(beams=2, gamma="auto")
    )
    # A checkpoint's settings of searches are no options of other decoding.
    assert without_open(options(), {"length_penalty": 2.0}).length_penalty is None
    assert without_open(options(beams=2), {"length_penalty": 2.0}).length_penalty == 2.0
