"""Slots: each input gets the output that it gets in any batch, in any order and company."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.loops import refill
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA
from spec_t5x.sampling.distributions import sampling
from spec_t5x.verifiers import BlockVerifier, CoupledVerifier, TokenVerifier, TreeVerifier
from tests.drafts import test_every_draft as every_draft
from tests.simulated_devices import printed_by
from tests.toy_t5 import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, LENGTH, NUM = 30, 14, 9
# Lengths from 8 down to 1, and texts of several lengths.
SOURCES = np.array(
    [
        [*(np.arange(place, place + max(8 - place, 1)) % 20 + 3), *[0] * min(place, 7)]
        for place in range(NUM)
    ],
    np.int32,
)
PROMPTS = np.zeros((NUM, 3), np.int32)
PROMPTS[1, 1:], PROMPTS[4, 1] = (7, 9), 5
KEYS = row_keys(jax.random.key(3), NUM)


@functools.cache
def target():
    return tiny_t5(0, num_decoder_layers=2)


@functools.cache
def draft():
    return TransformerDraft(disturbed(target(), 0.05))


def prepared(places, size, model, proposer, loop, *, paced=False, waits=True, width=8, steps=None):
    """Prepares inputs of these indices, and padding."""
    places = list(places)
    padded = np.array(places + [0] * (size - len(places)))
    limits = np.full(NUM, LENGTH, np.int32) if steps is None else steps
    is_real = np.arange(size) < len(places)
    return refill.prepare(
        model,
        proposer,
        SOURCES[padded, :width],
        PROMPTS[padded],
        KEYS[padded],
        np.where(is_real, limits[padded], 0).astype(np.int32),
        np.where(is_real, padded, refill.EMPTY_SLOT).astype(np.int32),
        loop=loop,
        paced=paced,
        waits=waits,
    )


def one_of(decoded, row):
    """Returns the outputs of one input, and their statistics."""
    parts = {name: getattr(decoded, name) for name in ("tokens", "scores", "lengths")}
    if decoded.stats is not None:
        parts |= vars(decoded.stats)
    return types.SimpleNamespace(**{name: leaf[row] for name, leaf in parts.items()})


def in_slots(
    proposer,
    groups,
    *,
    model=None,
    temperature=0.0,
    top_k=0,
    pace=None,
    num_slots=2,
    size=3,
    narrow=(),
    restarts=(),
    steps=None,
    **options,
):
    """Decodes groups, of which the first is the slots' own: results by input, target calls.

    Before the groups of the numbers ``restarts``, the pace is what it was at first.
    """
    model = model or target()
    options = {"gamma": 3, "verifier": TokenVerifier(), "max_decode_len": LENGTH} | options
    loop = Loop(**options | ({"gamma": 0} if proposer is None else {}))
    common = {"paced": pace is not None, "steps": steps}
    first, *rest = groups
    members = prepared(first, num_slots, model, proposer, loop, waits=False, **common)
    held, found, calls = refill.fill(members, pace), {}, 0
    for number, places in enumerate([*rest, None]):
        width = 4 if number in narrow else 8
        if number in restarts:
            held = held.replace(state=held.state.replace(pace=jax.tree.map(jnp.copy, pace)))
        group = prepared(places or (), size, model, proposer, loop, width=width, **common)
        drain = np.bool_(places is None)
        held, ended = refill.burst(
            model, proposer, held, group, sampling(temperature, top_k), drain, loop=loop
        )
        ended = jax.device_get(ended)
        calls += int(ended.calls)
        for row, place in enumerate(ended.places):
            if place != refill.EMPTY_SLOT:
                assert place not in found
                found[int(place)] = one_of(ended.decoded, row)
    assert np.all(np.asarray(held.places) == refill.EMPTY_SLOT)
    return types.SimpleNamespace(found=found, calls=calls)


def in_a_batch(proposer, model=None, temperature=0.0, top_k=0, **options):
    """Decodes all inputs in one batch."""
    options, arguments = {"max_decode_len": LENGTH} | options, (SOURCES, PROMPTS, KEYS)
    arguments = *arguments, sampling(temperature, top_k)
    if proposer is None:
        return jax.device_get(autoregressive_decode(model or target(), *arguments, **options))
    options = {"gamma": 3, "verifier": TokenVerifier()} | options
    return jax.device_get(speculative_decode(model or target(), proposer, *arguments, **options))


def check(found, expected):
    assert sorted(found) == list(range(NUM))
    # XLA may sum products of other numbers of rows in another order.
    atol = 0.0 if target().operations.platform == "cpu" else 1e-4
    for place, one in found.items():
        for name, values in vars(one_of(expected, place)).items():
            np.testing.assert_allclose(getattr(one, name), values, 0, atol, err_msg=name)


# The first two are in slots; groups of three wait, one is not full, one is empty.
GROUPS = [[0, 1], [2, 3, 4], [], [5, 6], [7, 8]]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "verifier": BlockVerifier()},
        # Hot, so that no input gets one text twice, in an order that rounding decides.
        {"temperature": 2.0, "verifier": TokenVerifier(), "num_decodes": 2},
        {"temperature": 1.0, "verifier": BlockVerifier()},
        {"temperature": 1.0, "verifier": CoupledVerifier()},
        {"temperature": 1.0, "verifier": TreeVerifier((2, 1, 1))},
    ],
    ids=["greedy", "decodes", "block", "coupled", "tree"],
)
def test_an_input_gets_what_it_gets_in_a_batch(options):
    """Texts, scores and statistics are equal, with the kernels for CPUs to the last bit."""
    expected = in_a_batch(draft(), **options)
    check(in_slots(draft(), GROUPS, **options).found, expected)
    assert np.ptp(expected.lengths) > 0 and np.sum(expected.stats.accepted) > 0


@pytest.mark.parametrize("by_xla", ["target", "draft"])
def test_one_model_may_have_kernels_and_the_other_none(by_xla):
    """Only one of them may suit the kernels; the states of both leave a program and enter one."""
    models = {"target": target(), "draft": draft().model}
    models[by_xla] = models[by_xla].replace(weights=models[by_xla].params, operations=XLA)
    proposer, model = TransformerDraft(models["draft"]), models["target"]
    expected = in_a_batch(proposer, model)
    for place, one in in_slots(proposer, GROUPS, model=model).found.items():
        other = one_of(expected, place)
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.accepted, other.accepted)


def test_tied_tokens_are_drawn_as_in_a_batch():
    """With ``top_k`` 1 coupled noise chooses among them, as in T5X; here all tokens tie."""
    params = target().params
    kernel = {"kernel": np.zeros_like(params["decoder"]["logits_dense"]["kernel"])}
    model = target().with_params(
        {**params, "decoder": {**params["decoder"], "logits_dense": kernel}}
    )
    options = {"model": model, "temperature": 1.0, "top_k": 1, "verifier": CoupledVerifier()}
    expected = in_a_batch(TransformerDraft(model), **options)
    check(in_slots(TransformerDraft(model), GROUPS, **options).found, expected)
    assert len(np.unique(expected.tokens)) > 9


@pytest.mark.parametrize(
    "name", ["eagle", "eagle, narrower", "shared encoder", "mixed", "mixed, doubting", "early exit"]
)
def test_the_state_of_a_draft_moves_with_its_input(name):
    """The statistics show it: a draft with another input's state would be rejected."""
    proposer, options = every_draft.T5_DRAFTS[name](), {"temperature": 1.0}
    options["model"] = every_draft.target()
    expected = in_a_batch(proposer, **options)
    check(in_slots(proposer, GROUPS, **options).found, expected)
    assert np.sum(expected.stats.accepted) > 0


def test_a_head_in_slots_with_several_decodes():
    proposer, options = every_draft.eagle(), {"temperature": 1.0, "num_decodes": 2}
    options["model"] = every_draft.target()
    check(in_slots(proposer, GROUPS, **options).found, in_a_batch(proposer, **options))


@pytest.mark.parametrize("decodes", [1, 2])
def test_plain_decoding_in_slots(decodes):
    options = {"temperature": 1.0, "num_decodes": decodes}
    check(in_slots(None, GROUPS, **options).found, in_a_batch(None, **options))


def test_a_draft_that_copies_reads_its_own_source():
    """A group's sources may be shorter than those of the slots."""
    groups, proposer = [[0, 1], [2, 3], [5, 6, 7], [4, 8]], CopyDraft(VOCAB)
    found = in_slots(proposer, groups, narrow=(1,)).found
    check(found, in_a_batch(proposer))


@pytest.mark.parametrize("c", [0.1, 0.5])
def test_at_a_pace_texts_are_the_same_and_so_is_a_second_run(c):
    """At the lower cost the draft is always asked, at the higher one sometimes."""
    pace = Pace.start(Costs.by_formula(c=c, largest=3), rest=2)
    first, again = (in_slots(draft(), GROUPS, pace=pace) for _ in range(2))
    plain = in_a_batch(None)
    for place, found in first.found.items():
        np.testing.assert_array_equal(found.tokens, plain.tokens[place])
        for name, values in vars(found).items():
            np.testing.assert_array_equal(getattr(again.found[place], name), values)
    calls, plain_steps = (
        sum(int(getattr(found, name)[0]) for found in first.found.values())
        for name in ("target_calls", "plain_steps")
    )
    assert calls - plain_steps > 2
    assert (plain_steps > 2) == (c > 0.2)


def test_a_pace_that_always_drafts_prefills_the_draft_for_those_who_wait():
    """The statistics show it: a draft that never saw an input's source would be rejected."""
    pace = Pace.start(Costs.by_formula(c=0.0, largest=3))
    check(in_slots(draft(), GROUPS, pace=pace).found, in_a_batch(draft(), pace=pace))


def test_a_draft_that_begins_late_reads_the_inputs_that_are_then_in_the_slots():
    """Plain steps of each of two bursts give slots to inputs; before them others had prompts.

    The target as its own draft has every draft accepted, unless it read another input.
    """
    pace = Pace.start(Costs.by_formula(c=0.5, largest=3), rest=6)
    for _ in range(4):
        pace = pace.speculative(jnp.array([1]), jnp.int32(3), jnp.int32(3))
    pace = pace.replace(lost=jnp.float32(0))
    groups = [[1, 4], [2, 3, 0], [5, 6], [7, 8]]
    found = in_slots(TransformerDraft(target()), groups, pace=pace, restarts=(1,)).found
    for one in found.values():
        np.testing.assert_array_equal(one.accepted_by_position, one.verified_by_position)
    late = {place for place, one in found.items() if one.plain_steps > 0 and one.accepted > 0}
    assert {0, 3, 7} <= late


@settings(max_examples=25)
@given(
    order=st.permutations(range(NUM)),
    sizes=st.lists(st.integers(0, 3), max_size=8),
    steps=st.lists(st.integers(0, LENGTH), min_size=NUM, max_size=NUM),
)
def test_inputs_in_any_order_groups_and_lengths(order, sizes, steps):
    """Each input gets its text, once, and no call is for empty slots alone."""
    groups, rest, steps = [order[:2]], order[2:], np.array(steps)
    for size in (*sizes, *[3] * NUM):
        groups, rest = [*groups, rest[:size]], rest[size:]
    run = in_slots(draft(), groups, temperature=1.0, steps=steps.astype(np.int32))
    everything = in_a_batch(draft(), temperature=1.0)
    assert sorted(run.found) == list(range(NUM))
    longest = 0
    for place, found in run.found.items():
        prompt = np.count_nonzero(PROMPTS[place, 1:])
        length = min(everything.lengths[place, 0], prompt + steps[place])
        assert found.lengths[0] == max(length, prompt)
        np.testing.assert_array_equal(
            found.tokens[0, :length], everything.tokens[place, 0, :length]
        )
        assert np.all(found.tokens[0, max(length, prompt) :] == 0)
        longest = max(longest, int(found.target_calls[0]))
    needed = sum(int(found.target_calls[0]) for found in run.found.values())
    # Of two slots, one may be empty while the other's input is the last.
    assert needed / 2 <= run.calls <= needed / 2 + longest * len(groups)


def test_slots_are_full_while_inputs_wait():
    """Each call is of two rows that have not ended, except those for the last input."""
    groups = [[0, 1], [2, 3, 4], [5, 6, 7], [8]]
    run = in_slots(draft(), groups)
    calls = {place: int(found.target_calls[0]) for place, found in run.found.items()}
    empty = 2 * run.calls - sum(calls.values())
    assert empty < max(calls.values())


def with_a_nan(model, by_xla):
    """Returns the model with the embedding of input 0's first token NaN."""
    params = jax.tree.map(np.array, model.params)
    params["token_embedder"]["embedding"][int(SOURCES[0, 0])] = np.nan
    model = model.with_params(params)
    return model.replace(weights=model.params, operations=XLA) if by_xla else model


# A freed slot is offered input 0, and then gets a shorter source.
OFFERED = {"groups": [[1, 2], [3, 4, 0], [5, 6, 7], [8]], "narrow": (1, 2)}


@pytest.mark.parametrize("by_xla", [False, True])
def test_numbers_that_are_not_finite_stay_in_their_input(by_xla):
    """Later inputs in the slot do not see an input's NaN."""
    model = with_a_nan(target(), by_xla)
    is_bad = (SOURCES[0, 0] == SOURCES).any(axis=1)
    assert is_bad[0] and not is_bad.all()
    expected = in_a_batch(TransformerDraft(model), model=model)
    runs = (
        in_slots(TransformerDraft(model), model=model, **given)
        for given in ({"groups": GROUPS}, OFFERED)
    )
    for place, one in itertools.chain(*(run.found.items() for run in runs)):
        assert np.isfinite(one.scores[0]) == np.isfinite(expected.scores[place, 0])
        assert np.isnan(one.scores[0]) or not is_bad[place]
        if not is_bad[place]:
            np.testing.assert_array_equal(one.tokens, expected.tokens[place])


def test_a_drafts_numbers_that_are_not_finite_stay_in_their_input():
    """The target's are finite, and so are scores and statistics at temperature 0."""
    proposer = TransformerDraft(with_a_nan(draft().model, by_xla=True))
    expected = in_a_batch(proposer)
    for place, one in in_slots(proposer, **OFFERED).found.items():
        np.testing.assert_array_equal(one.tokens, expected.tokens[place])
        np.testing.assert_array_equal(one.accepted, expected.stats.accepted[place])


def test_several_devices_gather_what_waits_once_for_a_burst():
    found = printed_by("loops/spread_refill_program.py", devices=2)
    assert found == {"cached": found["cached"], "outside": found["cached"], "in loops": 0}
    assert found["cached"] > 0
