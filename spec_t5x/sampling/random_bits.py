"""Functions ``fold_in`` and ``uniform``, bit for bit those of ``jax.random``, with kernels.

XLA for CPUs compiles a hash of two words into some ten small operations, which take longer than
the sampling itself; a kernel (``machine.operations``) is one call.
"""

import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.machine.operations import by_kernel
from spec_t5x.types import Array, Float32, Int, Key, UInt32

THREEFRY = "threefry2x32"


def threefry(key: Key[Array, ""]) -> Key[Array, ""]:
    """Returns a Threefry key: ``key`` itself, or one drawn from a key of another kind.

    JAX's other generators draw the same numbers for all keys in a ``vmap``.
    """
    if str(jax.random.key_impl(key)) == THREEFRY:
        return key
    return jax.random.key(jax.random.bits(key, dtype=jnp.uint32), impl=THREEFRY)


def is_threefry(key: Key[Array, "*batch"]) -> bool:
    """Returns whether JAX draws each number from a Threefry key and the number's index alone."""
    return str(jax.random.key_impl(key)) == THREEFRY and jax.config.jax_threefry_partitionable


def fold_in(key: Key[Array, ""], number: Int[Array, ""] | int) -> Key[Array, ""]:
    """Returns ``jax.random.fold_in(key, number)``, bit for bit."""
    if not is_threefry(key):
        return jax.random.fold_in(key, number)
    return _wrap(fold_in_words(jax.random.key_data(key), jnp.asarray(number).astype(jnp.uint32)))


@by_kernel
def fold_in_words(words: UInt32[Array, "2"], number: UInt32[Array, ""]) -> UInt32[Array, "2"]:
    """Returns the words of ``fold_in(key, number)`` for the Threefry key of these ``words``."""
    return jax.random.key_data(jax.random.fold_in(_wrap(words), number))


def uniform(key: Key[Array, ""], num: int) -> Float32[Array, "num"]:
    """Returns ``jax.random.uniform(key, (num,))``, bit for bit: numbers in [0, 1)."""
    if not is_threefry(key):
        return jax.random.uniform(key, (num,))
    return uniform_of_words(jax.random.key_data(key), num=num)


@by_kernel
def uniform_of_words(words: UInt32[Array, "2"], *, num: int) -> Float32[Array, "num"]:
    """Draws ``num`` uniform numbers in [0, 1) from the Threefry key of these ``words``."""
    return jax.random.uniform(_wrap(words), (num,))


def fractions(
    first: UInt32[Array, "*shape"], second: UInt32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Converts pairs of hashed words to numbers in [0, 1), as ``jax.random.uniform`` does."""
    # 23 random bits, as the fraction of a float, give a number in [1, 2).
    bits = ((first ^ second) >> 9) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) - 1


def _wrap(words: Array) -> Key[Array, ""]:
    return jax.random.wrap_key_data(words, impl=THREEFRY)
