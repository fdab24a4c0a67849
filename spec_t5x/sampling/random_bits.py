"""``jax.random.fold_in`` and ``uniform`` to the bit, in one call each on a CPU.

XLA for CPUs makes some ten small operations of a hash of two words, which take longer than the
sampling itself; a machine may have kernels for them (``machine.operations``).
"""

import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.machine.operations import by_kernel
from spec_t5x.types import Array, Float32, Int, Key, UInt32


def is_threefry(key: Key[Array, "*batch"]) -> bool:
    """Tells whether the numbers that JAX draws depend on the key and their index alone."""
    return str(jax.random.key_impl(key)) == "threefry2x32" and jax.config.jax_threefry_partitionable


def fold_in(key: Key[Array, ""], number: Int[Array, ""] | int) -> Key[Array, ""]:
    """Returns ``jax.random.fold_in(key, number)``."""
    if not is_threefry(key):
        return jax.random.fold_in(key, number)
    return _wrap(fold_in_words(jax.random.key_data(key), jnp.asarray(number).astype(jnp.uint32)))


@by_kernel
def fold_in_words(words: UInt32[Array, "2"], number: UInt32[Array, ""]) -> UInt32[Array, "2"]:
    """Folds a number into the words of a Threefry key."""
    return jax.random.key_data(jax.random.fold_in(_wrap(words), number))


def uniform(key: Key[Array, ""], num: int) -> Float32[Array, "num"]:
    """Returns ``jax.random.uniform(key, (num,))``, in [0, 1)."""
    if not is_threefry(key):
        return jax.random.uniform(key, (num,))
    return uniform_of_words(jax.random.key_data(key), num=num)


@by_kernel
def uniform_of_words(words: UInt32[Array, "2"], *, num: int) -> Float32[Array, "num"]:
    """Draws uniform numbers by the words of a Threefry key."""
    return jax.random.uniform(_wrap(words), (num,))


def fractions(
    first: UInt32[Array, "*shape"], second: UInt32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Makes numbers in [0, 1) of the two words of hashes, as ``jax.random.uniform`` does."""
    # 23 random bits are a number in [1, 2).
    bits = ((first ^ second) >> 9) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) - 1


def _wrap(words: Array) -> Key[Array, ""]:
    return jax.random.wrap_key_data(words, impl="threefry2x32")
