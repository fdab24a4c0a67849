"""Speculative execution beyond text (section 6): two slow functions, side by side.

``f(x)`` works out a distribution and ``g(x, y)`` needs a draw ``y`` from it, so that one
has to wait for the other. A cheap approximation of ``f`` proposes a draw, on which ``g``
starts while ``f`` runs; speculative sampling (section 2.3) accepts the draw or
replaces it. It accepts with probability ``alpha``, the overlap ``sum min`` of the two distributions
(Theorem 3.5), and the expected time goes from ``f + g`` to ``alpha max(f, g) + (1 - alpha)
(f + g)``.

The outcome has the distribution that it has one after the other, exactly. It needs
no language model: f may be a policy and g a simulator of the world.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.sampling.distributions import check_float32, sample
from spec_t5x.sampling.verification import Verdict, token_verification
from spec_t5x.types import Array, Float32, Key

Input = TypeVar("Input")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Execution(Generic[Result]):
    """The outcome of one speculative execution."""

    # y, a draw from f(x).
    draw: int
    # g(x, y).
    result: Result
    # Says whether the proposed draw was accepted, so that g ran once; it runs twice otherwise.
    accepted: bool


def execute_speculatively(
    key: Key[Array, ""],
    x: Input,
    f: Callable[[Input], Float32[Array, "outcomes"]],
    g: Callable[[Input, int], Result],
    approximate_f: Callable[[Input], Float32[Array, "outcomes"]],
    executor: concurrent.futures.Executor,
) -> Execution[Result]:
    """Draws ``y ~ f(x)`` and computes ``g(x, y)``, with both running at once.

    ``g`` may run for a draw that is then refused, so it should have no side effects; its errors
    for a refused draw are dropped. ``executor`` needs two free workers, and a third one for as
    long as a refused run of ``g`` lasts.

    Args:
      key: of all draws.
      x: what f and g take.
      f: the distribution of y, slow.
      g: what is wanted of x and y, slow.
      approximate_f: a distribution near ``f``'s over the same outcomes, fast.
      executor: where ``f`` and ``g`` run.

    Raises:
      InputError: the distributions are not over the same outcomes, or are of fewer bits
        than float32.
      Exception: an error of ``f``, or of ``g`` for the final draw.
    """
    propose_key, accept_key, emit_key = jax.random.split(key, 3)
    guessed_probs = _float32(approximate_f(x), "what f's approximation gives")
    guess = int(_sample(propose_key, guessed_probs))
    # Speculation: g runs on the guess before f has accepted it.
    probs_to_come = executor.submit(f, x)
    result_to_come = executor.submit(g, x, guess)
    try:
        probs = _float32(probs_to_come.result(), "what f gives")
        _check(probs, guessed_probs)
    except BaseException:
        result_to_come.cancel()
        raise
    verdict = _verify_one(accept_key, emit_key, guess, guessed_probs, probs)
    if verdict.num_accepted == 1:
        return Execution(draw=guess, result=result_to_come.result(), accepted=True)
    result_to_come.cancel()
    draw = int(verdict.next_token)
    return Execution(draw=draw, result=g(x, draw), accepted=False)


_sample = jax.jit(sample)


@jax.jit
def _verify_one(accept_key, emit_key, guess, guessed_probs, probs) -> Verdict:
    """Runs Algorithm 1 with gamma = 1: ``next_token`` is the draw if the guess is refused."""
    # Nothing follows an accepted guess: the last row is there for the shape.
    target_probs = jnp.stack([probs, probs])
    guesses = jnp.asarray(guess, jnp.int32)[None]
    return token_verification(accept_key, emit_key, guesses, guessed_probs[None], target_probs)


def _float32(probs: Array, whose: str) -> Float32[Array, "outcomes"]:
    """Puts probabilities on the device, where NumPy's float64 is rounded."""
    probs = jnp.asarray(probs)
    check_float32(probs, whose)
    return probs


def _check(probs: Array, guessed_probs: Array) -> None:
    if probs.shape != guessed_probs.shape:
        raise InputError(
            f"f gives {probs.shape} probabilities and its approximation {guessed_probs.shape}: "
            "let both range over the same outcomes"
        )
