"""``jax.random.fold_in`` and ``uniform`` to the bit, in one call each on a CPU.

XLA for CPUs makes some ten small operations of a hash of two words, which costs more than the
sampling that it is for. Where the kernels are not for the key, JAX's functions are called.
"""

import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.machine.cpu_kernels import calls as cpu_kernels
from spec_t5x.types import Array, Float32, Int, Key, UInt32


def is_threefry(key: Key[Array, "*batch"]) -> bool:
    """Whether the numbers that JAX draws with it depend on the key and their index alone."""
    return str(jax.random.key_impl(key)) == "threefry2x32" and jax.config.jax_threefry_partitionable


def fold_in(key: Key[Array, ""], number: Int[Array, ""] | int) -> Key[Array, ""]:
    """``jax.random.fold_in``."""
    if not _by_kernel(key):
        return jax.random.fold_in(key, number)

    def by_jax(words, number):
        return jax.random.key_data(jax.random.fold_in(_wrap(words), number))

    words = jax.random.key_data(key), jnp.asarray(number).astype(jnp.uint32)
    return _wrap(lax.platform_dependent(*words, cpu=cpu_kernels.threefry, default=by_jax))


def uniform(key: Key[Array, ""], num: int) -> Float32[Array, "num"]:
    """``jax.random.uniform(key, (num,))``, in [0, 1)."""
    if not _by_kernel(key):
        return jax.random.uniform(key, (num,))

    def by_kernel(words):
        every = jnp.broadcast_to(words, (num, 2))
        hashed = cpu_kernels.threefry(every, jnp.arange(num, dtype=jnp.uint32))
        return fractions(hashed[:, 0], hashed[:, 1])

    def by_jax(words):
        return jax.random.uniform(_wrap(words), (num,))

    words = jax.random.key_data(key)
    return lax.platform_dependent(words, cpu=by_kernel, default=by_jax)


def fractions(
    first: UInt32[Array, "*shape"], second: UInt32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Numbers in [0, 1) of the two words of hashes, as ``jax.random.uniform`` makes them."""
    # 23 random bits are a number in [1, 2).
    bits = ((first ^ second) >> 9) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) - 1


def _wrap(words: Array) -> Key[Array, ""]:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _by_kernel(key: Key[Array, ""]) -> bool:
    return is_threefry(key) and cpu_kernels.alone()
