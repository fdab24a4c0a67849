"""Arguments of the loops that are refused before compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.beams.search import beam_search
from spec_t5x.errors import InputError
from spec_t5x.loops import arguments
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import NoDraft
from spec_t5x.loops.speculative import speculative_decode, speculative_steps
from spec_t5x.sampling.distributions import sampling
from tests.loops.stubs import counts_upwards, no_prompts
from tests.older_jax import enable_x64
from tests.toy_drafts import StubTarget


def test_64_bits_are_refused():
    with enable_x64(True), pytest.raises(InputError, match="jax_enable_x64 is True"):
        arguments.check_prompts(np.zeros((2, 2), np.int32), 5)


HOLE = np.array([[0, 3, 4, 0], [0, 5, 0, 7]], np.int32)


@pytest.mark.parametrize("prompts", [HOLE, jnp.asarray(HOLE)], ids=["numpy", "jax"])
def test_a_prompt_with_padding_inside_is_refused_before_compilation(unchecked, prompts):
    """The check comes first: there is no model."""
    none, room = [None] * 4, {"max_decode_len": 8}
    for call in (
        lambda: autoregressive_decode(*none[:2], prompts, *none[:2], **room),
        lambda: speculative_decode(*none[:3], prompts, *none[:2], gamma=1, **room),
        lambda: next(speculative_steps(*none[:3], prompts, *none[:2], gamma=1, **room)),
        lambda: beam_search(*none[:2], prompts=prompts, beams=2, **room),
    ):
        with pytest.raises(InputError, match=r"prompt 1 is \[0, 5, 0, 7\]: put padding"):
            call()


WRONG = {
    "a list": ({"inputs": [[3, 1], [4, 1]]}, "inputs hold 3: give an array"),
    "rows": (
        {"inputs": np.ones((3, 2), np.int32)},
        "inputs have 3 rows and prompts 2: give as many",
    ),
    "float steps": ({"max_decode_steps": 3.0}, "max_decode_steps is 3.0: give a whole number"),
    "listed steps": ({"max_decode_steps": [1, 2]}, r"max_decode_steps is \[1, 2\]: give a whole"),
    "negative steps": ({"max_decode_steps": -1}, "max_decode_steps is -1: give at least 0, at"),
    "steps of 64 bits": ({"max_decode_steps": np.array([5, 2**40])}, "is 1099511627776: give at l"),
    "steps without a sign": ({"max_decode_steps": np.uint32(2**31)}, "is 2147483648: give at l"),
    "negative steps of a device": (
        {"max_decode_steps": jnp.array([5, -3])},
        "is -3: give at least",
    ),
    "too many steps": ({"max_decode_steps": np.ones(3, np.int32)}, "give a whole number, or an"),
    "listed ends": ({"eos_id": [1, 2]}, r"eos_id is \[1, 2\]: give an id, or a tuple"),
    "no end": ({"eos_id": None}, "eos_id is None: give an id, or a tuple"),
    "no ends": ({"eos_id": ()}, r"eos_id is \(\): give an id, or a tuple"),
    "an array as an end": ({"eos_id": jnp.int32(1)}, "eos_id is Array.1, .*: give an id, or a"),
    "a text": ({"eos_id": (1, "2")}, r"eos_id is \(1, '2'\): give an id, or a tuple"),
    "a class": ({"target": StubTarget}, "StubTarget is a class: give an object"),
    "a draft": ({"target": NoDraft(9)}, "NoDraft has no state_size, .*: see interfaces.Target"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=list(WRONG))
def test_arguments_that_cannot_be_traced_are_refused_before_compilation(
    unchecked, changes, message
):
    given = {"target": StubTarget(counts_upwards(9), 9), "inputs": np.ones((2, 2), np.int32)}
    given |= {"prompts": no_prompts(2), "max_decode_len": 8, **changes}
    sampled = {"rng": jax.random.key(0), "settings": sampling(0.0)}
    drafted = {**sampled, "draft": NoDraft(9), "gamma": 0}
    for call, more in (
        (autoregressive_decode, sampled),
        (speculative_decode, drafted),
        (speculative_steps, drafted),
        (beam_search, {"beams": 2}),
    ):
        with pytest.raises(InputError, match=message):
            call(**given, **more)
