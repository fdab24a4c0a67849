"""Settings of T5X's decoding functions, read for the package's loops; checks of prompts.

A T5X model holds a ``decode_fn`` (gin's, a partial, or the plain function) and gets
``decoder_params`` at run time. A setting that the loops do not support is an error.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from t5x import decoding

from spec_t5x.errors import InputError, as_input_error, check_numbers, one_line
from spec_t5x.loops.arguments import first_hole
from spec_t5x.sampling.distributions import Sampling, is_one_number, sampling
from spec_t5x.t5x_plugin.remaking import without_gin
from spec_t5x.types import PAD_ID, Array, Int

# Arguments of T5X's functions that T5X's models give, not the user.
_OF_THE_MODEL = ("inputs", "cache", "tokens_to_logits", "num_decodes", "cache_offset")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Arguments of ``t5x.decoding.temperature_sample``."""

    sampling: Sampling
    eos_id: int
    # Random key, raw as T5X's (uint32) or typed.
    rng: Array
    # Tokens after the prompt at most: a number or one for each row; None fills the row.
    max_decode_steps: Any
    rescale_log_probs: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSettings:
    """Arguments of ``t5x.decoding.beam_search``."""

    eos_id: int
    alpha: float | Array
    # Length of a hypothesis at most; None is the width of the batch's targets.
    max_decode_len: int | None


def read_settings(
    decode_fn: Callable,
    decoder_params: Mapping[str, Any] | None,
    rng: Array | None,
    eos_id: int,
    max_decode_len: int,
) -> SampleSettings | BeamSettings:
    """Reads the settings of one call of ``predict_batch_with_aux``.

    Precedence is T5X's: ``decoder_params`` (with ``rng`` and ``eos_id``), then bindings by gin or
    a partial, then the function's defaults (``topk`` is 1 there). ``decode_fn`` is T5X's
    ``temperature_sample`` or ``beam_search``: gin's, in ``functools.partial``, or plain;
    ``max_decode_len`` is the width of the batch's targets.

    Raises:
      InputError: another function, an unknown argument, or a value that the loops do not support.
    """
    function, bound = _function_and_bindings(decode_fn)
    params = dict(decoder_params or {})
    if rng is not None:
        if params.get("decode_rng") is not None:
            raise InputError(
                "an rng and decoder_params['decode_rng'] were given: leave one of them out"
            )
        params["decode_rng"] = rng
    params.setdefault("eos_id", eos_id)
    signature = inspect.signature(function).parameters
    defaults = {name: signature[name].default for name in signature if name not in _OF_THE_MODEL}
    for name in (*bound, *params):
        if name not in defaults:
            remedy = f"{function.__name__} takes {', '.join(defaults)} here"
            if name == "num_decodes":
                remedy = "bind predict_batch_with_aux.num_decodes"
            raise InputError(f"decoder parameter {name!r}: {remedy}")
    values = defaults | bound | params
    if values["initial_index"] is not None:
        raise InputError("initial_index is set: leave it out, the model sets it by the prompts")
    if function is decoding.temperature_sample:
        return _sample_settings(values, max_decode_len)
    return _beam_settings(values, defaults, max_decode_len)


def _function_and_bindings(decode_fn: Callable) -> tuple[Callable, dict[str, Any]]:
    """Returns T5X's plain function and the arguments that are bound to it."""
    bound: dict[str, Any] = {}
    while isinstance(decode_fn, functools.partial):
        if decode_fn.args:
            raise InputError("decode_fn binds positional arguments: bind them by name")
        bound = decode_fn.keywords | bound
        decode_fn = decode_fn.func
    function = without_gin(decode_fn)
    if function not in (decoding.temperature_sample, decoding.beam_search):
        # A wrapper may have the ``__qualname__`` of what it wraps.
        name = function.__code__.co_qualname if hasattr(function, "__code__") else repr(function)
        raise InputError(
            f"decode_fn is {name}: speculate with t5x.decoding.temperature_sample or beam_search"
        )
    if function is not decode_fn:
        what = f"decode_fn is {function.__name__} in a gin scope, whose bindings cannot be read"
        with as_input_error(what, "bind its parameters without a scope", ValueError):
            bound = gin.get_bindings(decode_fn) | bound
    return function, bound


def _sample_settings(values: Mapping[str, Any], max_decode_len: int) -> SampleSettings:
    for name in ("state_callback_fn", "logit_callback_fn"):
        if values[name] is not None:
            raise InputError(f"{name} is set, but speculation would skip its calls: leave it out")
    steps, limit = values["max_decode_steps"], values["max_decode_steps_hard_limit"]
    if steps is not None:
        is_known = not isinstance(steps, jax.core.Tracer)
        steps = np.asarray(steps) if is_known else steps
        if limit is not None and limit > 0:
            steps = (np if is_known else jnp).minimum(steps, limit)
        is_whole = jnp.issubdtype(steps.dtype, jnp.integer) and np.ndim(steps) < 2
        if not is_whole or is_known and not 1 <= steps.min() <= steps.max() <= max_decode_len:
            remedy = f"give whole numbers from 1 to {max_decode_len}"
            raise InputError(f"max_decode_steps is {one_line(steps)}: {remedy}")
    return SampleSettings(
        sampling=_sampling(values),
        eos_id=values["eos_id"],
        # T5X's default. A caller who wants other draws gives another key.
        rng=jax.random.PRNGKey(0) if (rng := values["decode_rng"]) is None else rng,
        max_decode_steps=steps,
        rescale_log_probs=bool(values["rescale_log_probs"]),
    )


def _sampling(values: Mapping[str, Any]) -> Sampling:
    filters = {}
    for name, ours in (("topk", "top_k"), ("topp", "top_p")):
        value = values[name]
        if isinstance(value, jax.core.Tracer) or not is_one_number(value):
            given = f"{name} is {one_line(repr(value))}"
            raise InputError(f"{given}: give one number, known when the program is traced")
        filters[ours] = np.asarray(value).item()
    temperature = values["temperature"]
    if not isinstance(temperature, jax.core.Tracer):
        return sampling(temperature, **filters)
    return sampling(1.0, **filters).replace(temperature=jnp.asarray(temperature, jnp.float32))


def _beam_settings(
    values: Mapping[str, Any], defaults: Mapping[str, Any], max_decode_len: int
) -> BeamSettings:
    for name in ("max_decode_step", "min_log_prob"):
        if values[name] != defaults[name]:
            raise InputError(f"{name} is {values[name]}, which is not supported: leave it out")
    length, alpha = values["max_decode_len"], values["alpha"]
    if length is not None:
        check_numbers(1, max_decode_len, max_decode_len=length)
    is_known = not isinstance(alpha, jax.core.Tracer)
    if not is_one_number(alpha) or (is_known and not 0 <= np.asarray(alpha) < math.inf):
        raise InputError(f"alpha is {one_line(repr(alpha))}: give a number of at least 0")
    return BeamSettings(eos_id=values["eos_id"], alpha=alpha, max_decode_len=length)


def check_prompts(
    prompts: Int[Array, "batch width"], room: int | None = None, end: Any = None
) -> None:
    """Checks that prompts have no padding before a token, at most ``room`` tokens and no ``end``.

    T5X generates a token in place of that padding and then forces the rest of the prompt; the loops
    force prefixes alone. If ``room`` is None, all tokens of ``prompts`` are allowed. ``end`` is the
    ``eos_id`` of a search: T5X's search ends at this token in a prompt, the package's would not.

    Raises:
      InputError: prompts are at fault, or, if they are traced, the run fails with this error.
    """
    check = functools.partial(_check, room=prompts.shape[1] - 1 if room is None else room)
    if isinstance(prompts, jax.core.Tracer) or isinstance(end, jax.core.Tracer):
        jax.debug.callback(check, prompts, end)
    else:
        check(prompts, end)


def _check(prompts: Int[Array, "batch width"], end: Any, room: int) -> None:
    if (hole := first_hole(prompts)) is not None:
        raise InputError(
            f"prompt {hole} of the batch has padding or an end of sequence before its end: "
            "give prompts without holes"
        )
    longest = np.count_nonzero(np.asarray(prompts)[:, 1:] != PAD_ID, axis=1).max(initial=0)
    if longest > room:
        raise InputError(
            f"a prompt holds {longest} tokens and max_decode_len is {room}: raise max_decode_len "
            "or shorten the prompts"
        )
    if end is not None and np.any(np.asarray(prompts)[:, 1:] == end):
        raise InputError(
            f"a prompt holds {end}, the search's eos_id: leave it out, or take temperature_sample"
        )
