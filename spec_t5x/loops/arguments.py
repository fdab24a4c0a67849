"""Checks of the loops' arguments: ``check_given`` at each call, ``check`` while JAX traces."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x import interfaces
from spec_t5x.errors import InputError, check_jax, check_numbers, is_number
from spec_t5x.interfaces import Draft, NodeTarget, Target, TreeDraft
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.pace import Pace
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.draws import RowStream, Stream, T5XStream
from spec_t5x.sampling.random_bits import THREEFRY, threefry
from spec_t5x.types import EOS_ID, PAD_ID, Array, Int, Key, PyTree


def check_given(
    target: Any, inputs: PyTree, prompts: Any, max_decode_steps: Any = None, **others: Any
) -> None:
    """Raises ``InputError`` for arguments of a loop that JAX could not trace or combine."""
    _check_whole(prompts)
    interfaces.check_parts(target)
    if "draft" in others:
        interfaces.check_fits(others["draft"], target)
    rows = prompts.shape[:1]
    for leaf in jax.tree.leaves(inputs):
        if not hasattr(leaf, "shape"):
            raise InputError(f"inputs hold {leaf!r}: give an array, as tokens [batch, source]")
        if rows and leaf.shape[:1] not in ((), rows):
            raise InputError(
                f"inputs have {leaf.shape[0]} rows and prompts {rows[0]}: give as many"
            )
    steps = np.int32(0) if max_decode_steps is None else max_decode_steps
    kind = getattr(steps, "dtype", type(steps))
    if not jnp.issubdtype(kind, np.integer) or np.shape(steps) not in ((), rows):
        raise InputError(f"max_decode_steps is {steps}: give a whole number, or an array of {rows}")
    if is_known(steps):
        for one in np.unique(steps).tolist():
            check_numbers(0, 2**31 - 1, max_decode_steps=one)
    eos_id = others.get("options", others).get("eos_id", EOS_ID)
    ids = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    if not (ids and all(is_number(one, numbers.Integral) for one in ids)):
        raise InputError(f"eos_id is {eos_id!r}: give an id, or a tuple of ids")


def _check_whole(prompts: Any) -> None:
    """Raises ``InputError`` if prompts are no array, or have padding before one of their tokens."""
    if not hasattr(prompts, "ndim"):
        raise InputError(f"prompts are a {type(prompts).__name__}: give an array [batch, width]")
    hole = first_hole(prompts) if prompts.ndim == 2 and is_known(prompts) else None
    if hole is not None:
        row = np.asarray(prompts)[hole].tolist()
        raise InputError(f"prompt {hole} is {row}: put padding (0) only after its last token")


def is_known(values: Any) -> bool:
    """Tells whether this process can read values: not abstract, traced or on other hosts."""
    if isinstance(values, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return getattr(values, "is_fully_addressable", True) or values.is_fully_replicated


def first_hole(prompts: Any) -> int | None:
    """Returns the index of the first prompt with padding before a token; None if none has."""
    is_token = np.asarray(prompts)[:, 1:] != PAD_ID
    holes = np.flatnonzero((~is_token[:, :-1] & is_token[:, 1:]).any(axis=1))
    return int(holes[0]) if holes.size else None


def prepared(
    target: Target,
    draft: Draft,
    prompts: Int[Array, "batch width"],
    rng: Key[Array, "*batch"] | Stream,
    settings: Sampling,
    loop: Loop,
    pace: Pace | None = None,
) -> tuple[Stream, Sampling]:
    """Checks the loop's arguments; returns the stream and the settings of all rows."""
    check(target, draft, prompts, loop)
    if not isinstance(settings, Sampling):
        raise InputError(f"settings are {settings}: give distributions.sampling(temperature)")
    if pace is not None and pace.largest != loop.gamma:
        given = f"gamma is {loop.gamma} and the pace's is {pace.largest}"
        raise InputError(f"{given}: give both the same")
    if settings.temperature.shape not in ((), prompts.shape[:1]):
        given = f"temperatures are {settings.temperature.shape} and prompts {prompts.shape}"
        raise InputError(f"{given}: give one temperature, or one for each prompt")
    settings = settings.repeat(loop.num_decodes)
    settings = settings.keep_ties() if loop.verifier.coupled else settings
    return row_stream(rng, prompts.shape[0], loop), settings


def check(target: Target, draft: Draft, prompts, loop: Loop) -> None:
    """Raises ``InputError`` unless models, prompts and the loop's settings fit together."""
    interfaces.check_positions(target, loop.max_decode_len)
    interfaces.check_fits(draft, target, loop.max_decode_len)
    reads, depths = draft.traits.uses_target_states, draft.traits.depths
    if reads and not target.state_size or depths and not hasattr(target, "showing"):
        more = f" and those of layers {list(depths)}" if depths else ""
        raise InputError(
            f"{type(draft).__name__} needs the target's states{more}, and {type(target).__name__} "
            "lacks them (state_size, method showing): use another draft"
        )
    if loop.gamma and (tree := loop.verifier.tree(loop.gamma)) is not None:
        interfaces.check_parts(target, NodeTarget, "use a verifier of chains")
        interfaces.check_parts(
            draft, TreeDraft, "give a draft that proposes trees, or a verifier of chains"
        )
        check_numbers(1, target.vocab_size, **{"the largest of widths": max(tree.branching)})
    check_prompts(prompts, loop.max_decode_len)


def check_prompts(prompts: Any, max_decode_len: int) -> None:
    """Raises ``InputError`` unless prompts are ids ``[batch, width]`` within ``max_decode_len``."""
    check_jax(of_texts=False)
    dtype, shape = prompts.dtype, prompts.shape
    # JAX makes int32 of int64.
    if len(shape) != 2 or 0 in shape or dtype not in (jnp.int32, jnp.int64):
        raise InputError(f"prompts are {dtype} {shape}: give int32 [batch, 1 + length], batch >= 1")
    if shape[1] > 1 + max_decode_len:
        given = f"prompts hold {shape[1] - 1} tokens and max_decode_len is {max_decode_len}"
        raise InputError(f"{given}: raise max_decode_len or shorten the prompts")


def row_stream(rng: Key[Array, "*batch"] | Stream, batch: int, loop: Loop) -> Stream:
    """Returns the stream of the rows of ``batch`` inputs, ``rng`` itself if that is a stream.

    Raises ``InputError`` unless ``rng`` is a Threefry key, or one for each input; and for T5X's
    stream if the verifier is not coupled, or the stream has other rows or too few steps.
    """
    if isinstance(rng, RowStream):
        return rng
    if not isinstance(rng, T5XStream):
        keys = _checked_keys(rng, batch)
        return RowStream(row_keys(keys, batch, loop.num_decodes))
    if not loop.verifier.coupled:
        raise InputError("T5X's chain of keys has one draw a step: use the coupled verifier")
    rows, steps = rng.starts.shape[0], rng.steps.shape[0]
    num_rows, num_steps = batch * loop.num_decodes, loop.max_decode_len
    if rows != num_rows or steps < num_steps:
        raise InputError(
            f"T5X's chain of keys is for {rows} rows and {steps} steps: make it for "
            f"{num_rows} rows and {num_steps} steps"
        )
    return rng


def _checked_keys(rng: Any, batch: int) -> Key[Array, "*batch"]:
    """Returns a Threefry key, or one for each input; raises ``InputError`` for another ``rng``."""
    is_key = isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if not is_key or rng.shape not in ((), (batch,)):
        given = getattr(rng, "dtype", rng)
        raise InputError(f"rng is {given}: give jax.random.key(seed), or a key for each input")
    if rng.ndim == 0:
        return threefry(rng)
    if (kind := str(jax.random.key_impl(rng))) != THREEFRY:
        raise InputError(
            f"the inputs' keys are of JAX's {kind}, which draws the same numbers for all: make "
            f"them with impl={THREEFRY!r}"
        )
    return rng
