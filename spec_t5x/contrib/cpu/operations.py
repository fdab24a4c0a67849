"""Implementation of the core's ``Operations`` by the CPU kernels."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from spec_t5x.contrib.cpu import calls, layers, library, panels
from spec_t5x.machine.operations import Operations, Shapes
from spec_t5x.models.weights import Form
from spec_t5x.sampling.distributions import MIN_TEMPERATURE
from spec_t5x.sampling.random_bits import fractions
from spec_t5x.types import Array, Float32, Int, PyTree, UInt32


class CpuOperations(Operations):
    """Operations by kernels, for float32 models in processes whose only device is a CPU."""

    platform = "cpu"
    skips = True

    def usable(self, shapes: Shapes, dtype: str) -> bool:
        """Returns True if ``dtype`` is float32 and the kernels can run on this process's device."""
        return dtype == "float32" and calls.usable()

    def suit(self, params: PyTree, dtype: str) -> bool:
        """Returns True if the parameters are packed, or float32 arrays that kernels can use."""
        return panels.is_packed(params) or (dtype == "float32" and calls.suit(params))

    def pack(self, params: PyTree) -> PyTree:
        """Packs matrices in panels, and embeddings in bfloat16 if that is exact."""
        return panels.pack(params)

    def packed(self, name: str, param: Array) -> Array | Form:
        """Packs one parameter, as ``pack`` does, by the last part of its path."""
        return panels.packed(name, param)

    def first(self, model: PyTree, num: Int[Array, ""]) -> PyTree:
        """Returns the model with products limited to the first ``num`` tokens of each row."""
        return panels.first(model, num)

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str | Callable) -> Any:
        """Calls a network's ``method`` with packed weights; kernels compute its layers."""
        with nn.intercept_methods(layers.intercept):
            return super().apply(module, weights, *args, method=method)

    def kernel(self, name: str, *arrays: Array) -> Callable | None:
        """Returns the kernel that replaces function ``name`` of ``sampling``; None if none fits."""
        suit = all(array.dtype in (jnp.float32, jnp.uint32) for array in arrays)
        return _KERNELS.get(name) if suit and calls.alone() else None

    def state(self) -> tuple[bool, str]:
        """Returns True if the kernels are or will be used, and why; does not compile them."""
        return library.state()


CPU = CpuOperations()


def _tempered(
    logits: Float32[Array, "*rows vocab"], temperature: Array, *numbers: Array, cut: str | None
) -> Float32[Array, "*rows vocab"]:
    rows = logits.shape[:-1]
    temperatures = jnp.broadcast_to(temperature, (*rows, 1))[..., 0]
    top_k, top_p = (jnp.broadcast_to(number, rows) for number in numbers)
    least = MIN_TEMPERATURE
    return calls.standardize(logits, temperatures, top_k, top_p, least_temperature=least)


def _overlap(target_probs: Array, draft_probs: Array) -> Array:
    ones = jnp.ones(target_probs.shape[:-1], jnp.float32)
    return calls.compare(target_probs, draft_probs, ones)[0]


def _hashed_uniforms(words: UInt32[Array, "2"], *, num: int) -> Float32[Array, "num"]:
    every = jnp.broadcast_to(words, (num, 2))
    hashed = calls.threefry(every, jnp.arange(num, dtype=jnp.uint32))
    return fractions(hashed[:, 0], hashed[:, 1])


# Kernels by the name of the function of ``sampling`` that each replaces.
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
