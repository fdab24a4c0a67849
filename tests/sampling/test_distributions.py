"""Tests of the sampled distribution, of the verifiers' parts of it, and of draws from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spec_t5x.errors import InputError
from spec_t5x.machine import operations
from spec_t5x.sampling.distributions import (
    MIN_TEMPERATURE,
    _invert,
    argmax,
    keep_top_k,
    keep_top_p,
    overlap,
    residual,
    sample,
    sampling,
    standardize,
)
from tests.sampling.chi_square import follows

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(params=["machine", "XLA"], scope="module", autouse=True)
def kernels(request):
    """Computes with the machine's kernels, or without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "XLA":
            patch.setattr(operations, "registered", lambda: (operations.XLA,))
        # Compiled functions keep the operations that they were traced with.
        jax.clear_caches()
        yield


# Three rows; the last one has a tie for the first place and an excluded token.
LOGITS = np.array(
    [[0.5, 2.0, -1.0, 1.0], [3.0, -2.0, 0.0, 0.5], [1.0, -np.inf, 1.0, 0.25]],
    np.float32,
)


def softmax(logits):
    """Returns the textbook's softmax, in float64."""
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def one_hot(tokens, vocab):
    return np.eye(vocab)[np.asarray(tokens)]


# standardize


@pytest.mark.parametrize("temperature", [0.0, MIN_TEMPERATURE])
def test_temperature_up_to_1e_4_puts_all_mass_on_the_first_argmax(temperature):
    # The last row, which has a tie, also beside rows that are sampled.
    for of_rows, first in ((temperature, 0), ([1.0, 1.0, temperature], 2)):
        probs = standardize(jnp.asarray(LOGITS), sampling(of_rows))
        np.testing.assert_array_equal(probs[first:], one_hot([1, 0, 0], 4)[first:])


@pytest.mark.parametrize("temperature", [2e-4, 2.5])
def test_temperature_divides_the_logits(temperature):
    probs = standardize(jnp.asarray(LOGITS), sampling(temperature))
    expected = softmax((LOGITS - LOGITS.max(-1, keepdims=True)) / temperature)
    np.testing.assert_allclose(probs, expected, atol=1e-6)


def test_a_rows_temperature_holds_at_all_its_positions():
    block = jnp.asarray(np.stack([LOGITS, LOGITS[::-1]]))
    probs = standardize(block, sampling([0.0, 2.0]))
    np.testing.assert_array_equal(probs[0], one_hot([1, 0, 0], 4))
    np.testing.assert_allclose(probs[1], softmax(LOGITS[::-1] / 2.0), atol=1e-6)


@pytest.mark.parametrize(
    ("k", "kept"),
    [
        (1, [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]),
        (2, [[0, 1, 0, 1], [1, 0, 0, 1], [1, 0, 1, 0]]),
        (3, [[1, 1, 0, 1], [1, 0, 1, 1], [1, 0, 1, 1]]),
        (4, [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]]),
        (9, [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]]),
    ],
)
def test_top_k_keeps_all_that_reach_the_kth_and_renormalises(k, kept):
    probs = standardize(jnp.asarray(LOGITS), sampling(1.0, top_k=k).keep_ties())
    masses = softmax(LOGITS) * kept
    np.testing.assert_allclose(probs, masses / masses.sum(-1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(np.asarray(probs) > 0, np.asarray(kept) > 0)


@pytest.mark.parametrize(
    ("name", "number", "other"),
    [("top_k", 2, 2), ("top_k", 2, jnp.int32(2)), ("top_p", 0.5, np.float64(0.5))],
)
def test_numbers_of_other_types_cut_as_well(name, number, other):
    expected, replaced = sampling(1.0, **{name: number}), sampling(1.0)
    # As ``replace`` does where no test checks types.
    object.__setattr__(replaced, name, other)
    logits = jnp.asarray(LOGITS)
    np.testing.assert_array_equal(standardize(logits, replaced), standardize(logits, expected))


@pytest.mark.parametrize("temperature", [0.5, [1.0, 0.0, 2.0]], ids=str)
def test_top_k_1_is_argmax_and_draws_nothing_unless_ties_are_kept(temperature):
    settings = sampling(temperature, top_k=1)
    assert settings.greedy and not settings.keep_ties().greedy
    probs = standardize(jnp.asarray(LOGITS), settings)
    np.testing.assert_array_equal(probs, one_hot([1, 0, 0], 4))
    # At temperature 0 there is no tie to keep, nor where more are kept.
    assert sampling(0.0, top_k=1).keep_ties().greedy
    assert not sampling(1.0, top_k=2).greedy


def test_top_p_1_keeps_all_whatever_their_sum_rounds_to():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4000)) * 4, jnp.float32)
    everything = standardize(logits, sampling(1.0))
    np.testing.assert_array_equal(standardize(logits, sampling(1.0, top_p=1.0)), everything)


@pytest.mark.parametrize("p", [1e-40, 1e-45, 1e-300])
def test_a_mass_that_float32_rounds_to_0_keeps_the_likeliest(p):
    probs = standardize(jnp.asarray(LOGITS), sampling(1.0, top_p=p))
    np.testing.assert_array_equal(probs, [[0, 1, 0, 0], [1, 0, 0, 0], [0.5, 0, 0.5, 0]])


def test_new_temperatures_and_masses_compile_nothing():
    program = jax.jit(lambda logits, settings: standardize(logits, settings))
    for temperature, p in ((1.0, 0.9), (0.7, 0.3), (2.0, 0.05)):
        found = program(jnp.asarray(LOGITS), sampling(temperature, top_p=p))
        whole = standardize(jnp.asarray(LOGITS), sampling(temperature))
        np.testing.assert_allclose(found, [nucleus_by_sorting(row, p) for row in whole], rtol=1e-5)
    assert program._cache_size() == 1
    # None and 1 keep all, in a program without the search for the nucleus.
    assert sampling(1.0).top_p is None is sampling(1.0, top_p=1.0).top_p


def test_temperature_comes_before_top_p():
    # Of 1, 2, 4 the largest has 4/7 < 0.7, and a second one is kept; at temperature 1/2 it has
    # 16/21 > 0.7.
    logits = jnp.log(jnp.array([[1.0, 2.0, 4.0]]))
    for temperature, expected in ((0.5, [[0, 0, 1]]), (1.0, [[0, 1 / 3, 2 / 3]])):
        probs = standardize(logits, sampling(temperature, top_p=0.7))
        np.testing.assert_allclose(probs, expected, atol=1e-6)


@pytest.mark.parametrize(
    "chosen",
    [
        sampling(0.0),
        sampling(0.7),
        sampling(1.0, top_k=2),
        sampling([1.0, 0.0, 2.0], top_p=0.6),
    ],
    ids=["argmax", "temperature", "top_k", "mixed top_p"],
)
def test_rows_sum_to_one_in_float32_whatever_the_logits_type(chosen):
    probs = standardize(jnp.asarray(LOGITS, jnp.bfloat16), chosen)
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(probs, np.float64).sum(-1), 1.0, atol=1e-6)
    # A softmax in bfloat16 is off by 1e-3 here.
    logits = jnp.asarray(np.linspace(-3, 3, 12, dtype=np.float32)[None], jnp.bfloat16)
    probs = standardize(logits, sampling(1.0))
    np.testing.assert_allclose(probs, softmax(np.asarray(logits, np.float64)), atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"temperature": 0.5}, {"temperature": 2.0}),
        ({"temperature": 1.0, "top_k": 2}, {"temperature": 0.7, "top_k": 2**40}),
        ({"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.7, "top_p": 0.9}),
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_changing_a_number_compiles_nothing(first, second):
    traced = []

    @jax.jit
    def probs(logits, chosen):
        traced.append(chosen)
        return standardize(logits, chosen)

    logits = jnp.asarray(LOGITS)
    for numbers in (first, second):
        chosen = sampling(**numbers)
        expected = jax.jit(standardize)(logits, chosen)
        np.testing.assert_array_equal(probs(logits, chosen), expected)
    assert len(traced) == 1


def test_settings_repeat_row_by_row():
    repeated = sampling([0.0, 1.0, 2.0], top_k=3).repeat(2)
    np.testing.assert_array_equal(repeated.temperature, [0, 0, 1, 1, 2, 2])
    assert repeated.top_k == 3
    assert sampling(0.5).repeat(3).temperature.shape == ()


# keep_top_p and keep_top_k against independent oracles


def nucleus_by_sorting(probs, p):
    """Sorts, accumulates and cuts; keeps tokens that tie with the last."""
    order = np.argsort(-probs, kind="stable")
    cumulative = np.cumsum(probs[order])
    last = min(np.searchsorted(cumulative, p), len(probs) - 1)
    kept = np.where(probs >= probs[order[last]], probs, 0)
    return kept / kept.sum()


TOP_P = jax.jit(keep_top_p)
TOP_K = jax.jit(keep_top_k)

# Whole numbers of 64ths (so that every sum is exact in float32), among them many
# zeros and ties, and p at, just below and just above the sums that occur.
WEIGHTS = st.lists(st.integers(0, 12), min_size=8, max_size=8).filter(any)


@hypothesis_settings(max_examples=100, derandomize=True)
@given(weights=WEIGHTS, numerator=st.integers(1, 128))
def test_top_p_equals_sort_and_cut_with_zeros_and_ties(weights, numerator):
    weights = np.asarray(weights, np.float64)
    # Scaled to whole 64ths that sum to 64.
    scaled = np.floor(weights * 64 / weights.sum())
    scaled[np.argmax(scaled)] += 64 - scaled.sum()
    probs, p = scaled / 64, numerator / 128
    result = TOP_P(jnp.asarray(probs, jnp.float32), jnp.float32(p))
    expected = nucleus_by_sorting(probs, p)
    np.testing.assert_array_equal(np.asarray(result) > 0, expected > 0)
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_thresholds_are_found_among_all_bit_patterns():
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(6, 99)) * 10.0 ** rng.integers(-40, 38, size=(6, 1))).astype("f4")
    # Ties, both infinities and both zeros.
    values[1] = np.round(values[1] / np.abs(values[1]).max() * 3)
    values[2, ::3], values[3, ::5], values[4, ::2], values[5] = -np.inf, np.inf, -0.0, 0.0
    values[4, ::6] = 0.0
    # Three neighbours, which differ by one in the last bits.
    values[0] = values[0, 0]
    for each in (2, 6):
        values[0, ::each] = np.nextafter(values[0, 0], np.float32(np.inf))
    for k in (1, 2, 5, 40, 98):
        kept = np.where(values >= np.sort(values, axis=-1)[:, -k, None], values, -np.inf)
        np.testing.assert_array_equal(TOP_K(jnp.asarray(values), k), kept)


@hypothesis_settings(max_examples=100, derandomize=True)
@given(values=st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.5]), min_size=6, max_size=6))
def test_argmax_is_the_first_of_the_largest_as_in_numpy(values):
    values = np.asarray(values, np.float32).reshape(2, 3)
    np.testing.assert_array_equal(argmax(jnp.asarray(values)), np.argmax(values, axis=-1))
    # Without a largest value the index is still one of the row's.
    assert 0 <= argmax(jnp.full(3, jnp.nan)) < 3


# residual and overlap


TARGET = jnp.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])


def test_residual_is_the_normalised_excess_of_the_target():
    draft = jnp.array([[0.25, 0.75, 0.0], [0.7, 0.1, 0.2]])
    # max(0, p - q): (1/4, 0, 1/4) and (0, 1/10, 5/10).
    expected = [[0.5, 0, 0.5], [0, 1 / 6, 5 / 6]]
    np.testing.assert_allclose(residual(TARGET, draft), expected, atol=1e-6)
    # The second row's draft exceeds the target everywhere, as rounding can cause.
    draft = jnp.stack([TARGET[0], TARGET[1] * 1.000001])
    np.testing.assert_array_equal(residual(TARGET, draft), TARGET)


@hypothesis_settings(max_examples=100, derandomize=True)
@given(seed=st.integers(0, 2**31 - 1))
def test_overlap_is_one_minus_total_variation_and_the_residuals_missing_mass(seed):
    exact = np.random.default_rng(seed).dirichlet([0.5] * 5, size=2)
    target, draft = jnp.asarray(exact, jnp.float32)
    (beta,) = overlap(target[None], draft[None])
    np.testing.assert_allclose(beta, 1 - np.abs(exact[0] - exact[1]).sum() / 2, atol=1e-6)
    # min(p, q) + (1 - beta) residual(p, q) = p: the scheme is lossless.
    law = np.minimum(*exact) + (1 - beta) * residual(target, draft)
    np.testing.assert_allclose(law, exact[0], atol=1e-6)


# errors


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((-0.5,), "-0.5"),
        ((float("nan"),), "nan"),
        ((float("inf"),), "inf"),
        (([1.0, -2.0],), "-2.0"),
        (([[1.0]],), "[[1.0]]"),
        ((1.0, -3), "-3"),
        ((1.0, 2.5), "2.5"),
        ((1.0, 0, -0.1), "-0.1"),
        ((1.0, 0, 1.5), "1.5"),
        ((1.0, 0, float("nan")), "nan"),
        ((1.0, 7, 0.25), "top_k is 7 and top_p is 0.25"),
        ((True,), "temperature is True: give a number"),
        (("0.5",), "temperature is 0.5: give a number"),
        (([True, False],), "temperature is [True, False]"),
        (([1.0, True],), "temperature is [1.0, True]"),
        ((1 + 2j,), "temperature is (1+2j): give a number"),
        ((1.0, True), "top_k is True: give a whole number"),
        ((1.0, "5"), "top_k is 5: give a whole number"),
        ((1.0, None), "top_k is None: give a whole number"),
        ((1.0, [5]), "top_k is [5]: give a whole number"),
        ((1.0, 0, np.bool_(True)), "top_p is True: give a number from 0 to 1"),
    ],
)
def test_unusable_settings_are_refused_in_one_line_with_their_value(arguments, value):
    with pytest.raises(InputError) as error:
        sampling(*arguments)
    assert value in str(error.value)
    assert "\n" not in str(error.value)


# drawing


# XLA splits the sums of so many numbers up and rounds them part by part; about 500 is the number of
# blocks, and of tokens in a block, of mT5's vocabulary.
@pytest.mark.parametrize("size", [1, 179, 512])
def test_no_uniform_number_draws_what_has_no_mass(size):
    rng = np.random.default_rng(size)
    draw = jax.jit(jax.vmap(_invert, (0, None)))
    for _ in range(5):
        masses = rng.dirichlet(np.full(size, 0.3)).astype(np.float32)
        masses[rng.random(size) < 0.4] = 0.0
        masses[rng.integers(size)] += 0.1
        # Both ends, and the numbers about each place where the outcome changes.
        edges = np.asarray(jax.jit(jnp.cumsum)(masses)) / masses.sum()
        steps = np.arange(-4, 5)[:, None] * 2.0**-24
        uniforms = np.clip(np.append(edges[None] + steps, [0, 1]), 0, 1 - 2.0**-24)
        drawn = np.asarray(draw(jnp.asarray(uniforms, jnp.float32), jnp.asarray(masses)))
        assert np.all((drawn >= 0) & (drawn < size))
        assert np.all(masses[drawn] > 0)
        # The index is right but for rounding.
        cumulative = np.cumsum(masses, dtype=np.float64) / masses.sum(dtype=np.float64)
        assert np.all(uniforms < cumulative[drawn] + 1e-6)
        assert np.all(uniforms > np.append(0.0, cumulative)[drawn] - 1e-6)


# No square number, so that the last block is not full; 1 and 2 have blocks of one.
@pytest.mark.parametrize("vocab", [1, 3, 1000])
def test_draws_follow_the_distribution(vocab):
    rng = np.random.default_rng(vocab)
    weights = np.where(rng.random(vocab) < 0.3, 0.0, rng.exponential(size=vocab))
    weights[-1] += 0.5
    probs = weights / weights.sum()
    keys = jax.random.split(jax.random.key(3), 50_000)
    tokens = jax.jit(jax.vmap(sample, (0, None)))(keys, jnp.asarray(probs, jnp.float32))
    assert follows(np.bincount(tokens, minlength=vocab), probs)
