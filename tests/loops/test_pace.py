"""The number of drafts at given costs and acceptance, without a clock or a model."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.loops.pace import OPTIMISM, REST, Costs, Pace

pytestmark = pytest.mark.usefixtures("quick_compilation")

CHEAP = Costs.by_formula(c=0.1, position=0.05)
# Iterations that never pay: 1.9 steps for 2 tokens is the best.
DEAR = Costs.by_formula(c=0.6, position=0.4)


class Text:
    """Texts written at a pace, with a draft of some acceptance rate at each position."""

    def __init__(self, costs: Costs, rows: int = 1, seed: int = 0):
        self.costs, self.rows, self.rng = costs, rows, np.random.default_rng(seed)
        self.pace = Pace.start(costs)
        # Time in plain steps, and tokens of each row.
        self.time = self.tokens = 0.0
        self.limits: list[int] = []

    def write(self, rates, steps: int) -> "Text":
        """Makes ``steps`` steps; ``rates`` is one for all positions, or one for each."""
        places = self.costs.largest
        for _ in range(steps // CHUNK):
            right = self.rng.random((CHUNK, self.rows, places)) < np.broadcast_to(rates, places)
            self.pace, (limits, tokens) = _write(self.pace, right)
            self.limits += limits.tolist()
            self.time += np.asarray(self.costs.iteration)[limits].sum()
            self.tokens += float(tokens.sum())
        return self

    @property
    def speed_up(self) -> float:
        return self.tokens / self.time


# Steps of one program.
CHUNK = 20


@jax.jit
def _write(pace, right):
    """Returns the pace after steps whose drafts are ``right``, and limits and tokens of each."""

    def step(pace, right):
        limit = pace.limit
        appended = 1 + jnp.minimum(jnp.cumprod(right, axis=1).sum(axis=1), limit)
        drafted = pace.speculative(appended, limit, limit)
        plain = pace.plain(jnp.ones_like(appended))
        is_plain = functools.partial(jnp.where, limit == 0)
        return jax.tree.map(is_plain, plain, drafted), (limit, jnp.mean(appended))

    return jax.lax.scan(step, pace, right)


def best_fixed(costs: Costs, rate: float) -> tuple[int, float]:
    """Returns the limit that is best for one rate, and its speed-up (Theorem 3.8)."""
    factors = [sum(rate**i for i in range(g + 1)) / cost for g, cost in enumerate(costs.iteration)]
    factors[0] = 1.0
    return int(np.argmax(factors)), max(factors)


@pytest.mark.parametrize(("rate", "rows"), [(0.5, 1), (0.9, 1), (0.7, 8)])
def test_the_best_gamma_is_found(rate, rows):
    text = Text(CHEAP, rows).write(rate, 600)
    best, factor = best_fixed(CHEAP, rate)
    assert abs(np.median(text.limits[100:]) - best) <= 2
    assert text.speed_up > 0.94 * factor


@pytest.mark.parametrize(("rate", "rows"), [(0.0, 1), (0.1, 1), (0.05, 8)])
def test_where_nothing_pays_plain_steps_are_taken(rate, rows):
    """Looks at the draft take their share of the time."""
    text = Text(CHEAP, rows).write(rate, 3000)
    assert np.mean(np.array(text.limits) > 0) < 0.3
    assert text.speed_up > 0.95
    # A look is over within a few dozen iterations, and later looks are rarer than the second.
    first = text.limits.index(0)
    assert 0 < first < 40 and not any(text.limits[first : first + REST])
    seldom = Text(CHEAP, rows).write(rate, 6000).limits
    assert np.mean(np.array(seldom[3000:]) > 0) < np.mean(np.array(seldom[:600]) > 0)


def test_a_good_draft_whose_first_tokens_are_rejected_is_soon_tried_again():
    """Here two rejected drafts end a look."""
    costs = Costs(iteration=(1.0, 1.7, 1.8, 2.0, 2.2))
    text = Text(costs)
    for _ in range(5):
        text.write(0.0, CHUNK).write(1.0, 400)
    drafting = np.array(text.limits).reshape(5, -1) > 0
    assert drafting[0, 0] and not drafting[0, 3:CHUNK].any()
    assert drafting[:, 5 * REST :].all()


def test_positions_that_are_easy_after_the_first_are_found_out():
    """The first copy is seldom right, and those after it nearly always."""
    rates = [0.35, *[0.97] * 7]
    text = Text(Costs.by_formula(c=0.0, position=0.05)).write(rates, 600)
    assert np.median(text.limits[100:]) >= 6
    assert text.speed_up > 1.5


def test_a_draft_that_turns_bad_loses_no_more_than_it_may_have_gained():
    """All drafts are accepted, then none, again and again."""
    text = Text(CHEAP)
    for rate in [1.0, 0.0] * 10:
        text.write(rate, 100)
    assert text.speed_up > 1
    # At the next look after it has turned good for longer.
    text.write(0.9, 600)
    assert np.mean(np.array(text.limits[-300:])) > 3


def test_a_prefill_has_to_pay_within_the_text():
    """The prefill pays in a long text, and not in one that ends soon."""
    text = Text(Costs(iteration=CHEAP.iteration, prefill=4.0)).write(0.6, 300)
    long, short = (text.pace.replace(length=jnp.float32(n)).new_batch() for n in (60, 5))
    assert int(long.limit) > 0
    assert int(short.limit) == 0
    # Nor does it pay in what is left of a long one.
    for written, pays in ((0, True), (56, False)):
        late = long.replace(idle=jnp.int32(10**6), written=jnp.float32(written))
        assert (late.plain(jnp.array([1])).limit > 0) == pays
    # One that costs nothing pays in a text of any length.
    free = late.replace(prefill=jnp.float32(0), written=jnp.float32(99))
    assert free.plain(jnp.array([1])).limit > 0
    # Once it has run, it no longer matters.
    after = short.made_ready().speculative(jnp.array([2]), jnp.int32(1), jnp.int32(1))
    assert int(after.limit) > 0 and after.lost > 4 - 2
    # A draft that is fed the text again has had its prefill.
    assert short.made_ready().made_ready().lost == short.made_ready().lost


def test_a_batch_tells_how_long_texts_are_and_a_pause_when_it_ends():
    pace, one = Pace.start(CHEAP).new_batch(), jnp.array([1])
    before = pace.length
    for _ in range(REST - 1):
        pace = pace.plain(one)
    assert pace.idle == REST - 1 and pace.plain(one).idle == 0
    # A pause begins after the last iteration.
    assert pace.speculative(one, jnp.int32(1), jnp.int32(1)).idle == 0
    # It moves towards the batch's, and not all the way.
    after = pace.end_batch().length
    assert min(before, REST - 1) < after < max(before, REST - 1)
    # A batch without text tells nothing.
    assert pace.end_batch().new_batch().end_batch().length == after


def test_a_draft_that_varies_is_judged_by_what_it_proposes():
    """Two of eight drafts are proposed, or none: one at full cost in each iteration never pays."""
    pace = Pace.start(Costs.by_formula(c=0.3, position=0.3))
    for _ in range(40):
        for longest, appended in ((0, [1, 1, 1, 1, 1]), (2, [1, 2, 3, 3, 3])):
            pace = pace.speculative(jnp.array(appended), jnp.int32(longest), jnp.int32(8))
    assert pace.limit > 0


def test_rows_that_have_ended_do_not_count():
    pace = Pace.start(CHEAP)
    alone, beside = jnp.array([3]), jnp.array([0, 3, 0])
    after, same = (pace.speculative(rows, jnp.int32(4), jnp.int32(8)) for rows in (alone, beside))
    for found, expected in zip(jax.tree.leaves(same), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert after.plain(jnp.array([0, 1])).written == 4
    # Each iteration takes a 32nd off the time lost before it.
    late = pace.replace(lost=jnp.float32(64)).speculative(alone, jnp.int32(4), jnp.int32(8))
    np.testing.assert_allclose(late.lost, 62 + CHEAP.iteration[4] - 3, rtol=1e-6)
    # Two drafts saved a step, and the third did not.
    np.testing.assert_array_equal(after.counts[:2, :4], [[1, 1, 0, 0], [1, 1, 1, 0]])
    # Nor did one that was not proposed within the limit; beyond the limit none is missed.
    for limit, reached in ((8, [1, 1, 1, 0]), (2, [1, 1, 0, 0])):
        short = pace.speculative(alone, jnp.int32(2), jnp.int32(limit))
        np.testing.assert_array_equal(short.counts[1, :4], reached)


def test_a_tree_is_taken_whole_or_not_at_all():
    costs = Costs.by_formula(c=0.1, position=0.1, largest=3, whole=True)
    assert set(Text(costs).write(0.9, 60).limits) == {3}
    assert set(Text(costs).write(0.0, 500).limits) == {0, 3}


@pytest.mark.parametrize("costs", [DEAR, Costs.by_formula(c=0.5, position=0.3, largest=2)])
def test_a_draft_that_pays_at_no_likely_rate_is_never_tried(costs):
    assert costs.needed > OPTIMISM
    assert Text(costs).write(1.0, 100).limits == [0] * 100


def test_the_rate_from_which_speculation_pays():
    assert Costs.by_formula(c=0.0).needed <= 0.03
    assert Costs(iteration=(1.0, 1.5)).needed == pytest.approx(0.54)
    assert DEAR.needed == math.inf


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"iteration": (1.0,)}, "give at least those of 0 and 1 drafts"),
        ({"iteration": (1.0, -0.5)}, "a cost is -0.5: give a number of at least 0, in plain steps"),
        ({"iteration": (1.0, float("nan"))}, "a cost is nan"),
        ({"iteration": (1.0, math.inf)}, "give a finite prefill and a"),
        ({"iteration": (1.0, 1.5), "prefill": -1.0}, "a cost is -1.0"),
    ],
)
def test_costs_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        Costs(**wrong)
