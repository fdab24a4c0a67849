"""Settings of T5X's decoding functions are read as T5X reads them, or refused."""

import functools

import pytest

pytest.importorskip("t5x.decoding", reason="needs T5X")

import gin
import jax
import jax.numpy as jnp
import numpy as np
from t5x.decoding import beam_search, temperature_sample

from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.decode_settings import check_prompts, read_settings

KEY = jax.random.PRNGKey(5)
LENGTH = 16
# The vocabulary's.
EOS = 1


def read(decode_fn, rng=None, **params):
    return read_settings(decode_fn, params, rng, EOS, LENGTH)


@pytest.fixture
def bound_by_gin():
    """Provides T5X's function as gin makes it, with bindings."""
    gin.clear_config()
    bind = gin.external_configurable(temperature_sample, module="decode_settings")
    for name, value in {"temperature": 1.5, "eos_id": 9, "topk": 0}.items():
        gin.bind_parameter(f"decode_settings.temperature_sample.{name}", value)
    yield bind
    gin.clear_config()


def test_defaults_are_t5xs():
    found = read(temperature_sample)
    np.testing.assert_array_equal(found.rng, jax.random.PRNGKey(0))
    assert found.sampling.greedy
    assert (found.eos_id, found.max_decode_steps, found.rescale_log_probs) == (EOS, None, True)
    search = read(beam_search)
    assert (search.eos_id, search.alpha, search.max_decode_len) == (EOS, 0.6, None)


def test_a_calls_parameters_come_before_bindings(bound_by_gin):
    """The vocabulary's end counts among a call's parameters, as in T5X's models."""
    found = read(bound_by_gin)
    assert (found.sampling.temperature, found.eos_id) == (1.5, EOS)
    partial = functools.partial(bound_by_gin, temperature=0.5)
    assert read(partial).sampling.temperature == 0.5
    found = read(partial, temperature=0.25, eos_id=7, rescale_log_probs=False)
    assert (found.sampling.temperature, found.eos_id) == (0.25, 7)
    assert not found.rescale_log_probs
    for params in ({}, {"decode_rng": None}):
        np.testing.assert_array_equal(read(partial, KEY, **params).rng, KEY)
    traced = jax.jit(lambda value: read(partial, temperature=value).sampling.temperature)
    assert traced(0.75) == 0.75


@pytest.mark.parametrize(
    ("steps", "limit", "expected"),
    [(LENGTH, None, LENGTH), (9, 4, 4), (4, 9, 4), (9, 0, 9), (9, -1, 9), (None, 4, None)],
)
def test_a_hard_limit_of_steps(steps, limit, expected):
    limits = {"max_decode_steps": steps, "max_decode_steps_hard_limit": limit}
    assert read(temperature_sample, **limits).max_decode_steps == expected
    limits["max_decode_steps"] = steps and [steps]
    assert read(temperature_sample, **limits).max_decode_steps == (expected and [expected])


def test_settings_of_a_search():
    found = read(beam_search, KEY, eos_id=7, alpha=0.0, max_decode_len=LENGTH)
    assert (found.eos_id, found.alpha, found.max_decode_len) == (7, 0.0, LENGTH)
    # An array, which JAX does not compare while it traces.
    half = jnp.float32(0.5)
    assert jax.jit(lambda: read(beam_search, alpha=half).alpha)() == 0.5


@pytest.mark.parametrize(
    ("decode_fn", "params", "message"),
    [
        (temperature_sample, {"state_callback_fn": len}, "state_callback_fn is set, but spec"),
        (
            temperature_sample,
            {"max_decode_steps": 0},
            "max_decode_steps is 0: give whole numbers from 1 to 16",
        ),
        (temperature_sample, {"max_decode_steps": np.array([3, 17])}, r"is \[ 3 17\]: give whole"),
        (temperature_sample, {"topk": True}, "topk is True: give one number"),
        (beam_search, {"max_decode_step": 5}, "max_decode_step is 5, which is not supported"),
        (beam_search, {"min_log_prob": -3.0}, "min_log_prob is -3.0, which is not supp"),
        (functools.partial(temperature_sample, None), {}, "binds positional arguments: bind them"),
    ],
)
def test_what_the_loops_do_not_have_is_refused(decode_fn, params, message):
    with pytest.raises(InputError, match=message):
        read(decode_fn, **params)


@functools.wraps(temperature_sample)
def hotter(*arguments, **options):
    return temperature_sample(*arguments, **options | {"temperature": 2.0})


@pytest.mark.parametrize("name", [None, "hotter"])
def test_a_function_that_wraps_t5xs_is_not_taken_for_it(name):
    """Its metadata are those of T5X's function."""
    made = gin.external_configurable(hotter, name, "decode_settings") if name else hotter
    with pytest.raises(InputError, match="decode_fn is hotter: speculate with t5x.decoding.temper"):
        read(made)


def test_a_filter_that_is_not_known_in_a_trace_is_refused():
    with pytest.raises(InputError, match="known when the program is traced"):
        jax.jit(lambda topk: read(temperature_sample, topk=topk).eos_id)(3)


def test_prompts_have_room_and_no_end_of_a_search():
    prompts = jnp.array([[0, 5, 7, 0], [0, 4, 0, 0], [7, 0, 0, 0]])
    check_prompts(prompts, room=2)
    check_prompts(prompts[:, :3])
    check_prompts(prompts, end=6)
    with pytest.raises(InputError, match="a prompt holds 2 tokens and max_decode_len is 1: raise"):
        check_prompts(prompts, room=1)
    for end in (5, 7):
        with pytest.raises(InputError, match=f"a prompt holds {end}, the search's eos_id"):
            check_prompts(prompts, end=end)
    # Start tokens are not of the prompt.
    check_prompts(prompts[1:], end=7)
    with pytest.raises(Exception, match="a prompt holds 7, the search's eos_id"):
        jax.block_until_ready(jax.jit(lambda end: check_prompts(prompts, end=end) or end)(7))
