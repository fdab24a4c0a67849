"""The kernels as an ``Operations`` of the core."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from spec_t5x.contrib.cpu import calls, layers, library, panels
from spec_t5x.machine.operations import Operations
from spec_t5x.models.weights import Form
from spec_t5x.sampling.distributions import MIN_TEMPERATURE
from spec_t5x.sampling.random_bits import fractions
from spec_t5x.types import Array, Float32, Int, PyTree, UInt32


class CpuOperations(Operations):
    """Kernels for models in float32 on the only device, a CPU."""

    platform = "cpu"
    skips = True

    def usable(self, dtype: str) -> bool:
        """Tells whether the kernels are available, and this process has one device, a CPU."""
        return dtype == "float32" and calls.usable()

    def suit(self, params: PyTree, dtype: str) -> bool:
        """Tells whether the parameters are packed, or float32 arrays on the only device."""
        return panels.is_packed(params) or (dtype == "float32" and calls.suit(params))

    def pack(self, params: PyTree) -> PyTree:
        """Packs matrices in panels, and embeddings at the width they need."""
        return panels.pack(params)

    def packed(self, name: str, param: Array) -> Array | Form:
        """Packs one parameter."""
        return panels.packed(name, param)

    def first(self, model: PyTree, num: Int[Array, ""]) -> PyTree:
        """Limits the products to the first ``num`` tokens of each row; other results are zeros."""
        return panels.first(model, num)

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str) -> Any:
        """Calls a method of a network, whose layers the kernels compute."""
        with nn.intercept_methods(layers.intercept):
            return super().apply(module, weights, *args, method=method)

    def kernel(self, name: str, *arrays: Array) -> Callable | None:
        """Returns a kernel over a vocabulary or of a hash, if the only device is a CPU."""
        suit = all(array.dtype in (jnp.float32, jnp.uint32) for array in arrays)
        return _KERNELS.get(name) if suit and calls.alone() else None

    def state(self) -> tuple[bool, str]:
        """Tells whether the kernels are used, or why not; compiles nothing."""
        return library.state()


CPU = CpuOperations()


def _tempered(
    logits: Float32[Array, "*rows vocab"], temperature: Array, *, top_k: int, top_p: float
) -> Float32[Array, "*rows vocab"]:
    temperatures = jnp.broadcast_to(temperature, (*logits.shape[:-1], 1))[..., 0]
    kept = {"top_k": top_k, "top_p": top_p}
    return calls.standardize(logits, temperatures, **kept, least_temperature=MIN_TEMPERATURE)


def _overlap(target_probs: Array, draft_probs: Array) -> Array:
    ones = jnp.ones(target_probs.shape[:-1], jnp.float32)
    return calls.compare(target_probs, draft_probs, ones)[0]


def _hashed_uniforms(words: UInt32[Array, "2"], *, num: int) -> Float32[Array, "num"]:
    every = jnp.broadcast_to(words, (num, 2))
    hashed = calls.threefry(every, jnp.arange(num, dtype=jnp.uint32))
    return fractions(hashed[:, 0], hashed[:, 1])


# Kernels by the names of functions of ``sampling``.
_KERNELS: dict[str, Callable] = {
    "argmax": lambda values: calls.summarize(values, with_sums=False)[0],
    "excess": lambda factors, target, draft: calls.compare(target, draft, factors)[1],
    "fold_in_words": calls.threefry,
    "log_sum_exp": lambda values: calls.summarize(values)[1],
    "overlap": _overlap,
    "sample_at": calls.sample,
    "sample_residual_at": calls.sample_residual,
    "tempered": _tempered,
    "uniform_of_words": _hashed_uniforms,
}
