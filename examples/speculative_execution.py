"""Speculative execution beyond text (section 6 of the paper): two slow functions in parallel.

``f(x)`` computes a distribution and ``g(x, y)`` needs a draw ``y`` from it, so that ``g`` must wait
for ``f``. A cheap approximation q of f's distribution p proposes a draw, with which ``g`` starts
while ``f`` runs; speculative sampling (section 2.3) then accepts or replaces the draw. The
probability of acceptance is ``alpha = sum(min(p, q))`` (Theorem 3.5), and the expected time falls
from ``f + g`` to ``alpha max(f, g) + (1 - alpha) (f + g)``.

The draw has exactly the distribution p. No language model is needed: ``f`` may be a policy and
``g`` a simulator.
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
    """Result of one speculative execution."""

    # Index y, drawn from the distribution f(x).
    draw: int
    # Value of g(x, y).
    result: Result
    # True if the proposed draw was accepted: then g was called once, otherwise twice.
    accepted: bool


def execute_speculatively(
    key: Key[Array, ""],
    x: Input,
    f: Callable[[Input], Float32[Array, "outcomes"]],
    g: Callable[[Input, int], Result],
    approximate_f: Callable[[Input], Float32[Array, "outcomes"]],
    executor: concurrent.futures.Executor,
) -> Execution[Result]:
    """Draws ``y ~ f(x)`` and computes ``g(x, y)``, running both functions in parallel.

    ``g`` may run for a draw that is then rejected, so it should have no side effects; its errors
    for a rejected draw are ignored. ``executor`` needs two free workers for each call; a rejected
    run of ``g`` keeps its worker until it ends.

    Args:
      key: random key of the draws.
      x: argument of f and g.
      f: slow function that returns the probabilities of all y.
      g: slow function of x and y, whose value is wanted.
      approximate_f: fast function that returns an approximation of ``f(x)``.
      executor: executor that runs ``f`` and ``g``.

    Raises:
      InputError: the distributions have different numbers of outcomes, or a type narrower
        than float32.
      Exception: an error of ``f``, of ``approximate_f``, or of ``g`` for the final draw.
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
    """Runs Algorithm 1 with gamma = 1; if it rejects the guess, ``next_token`` is the draw."""
    # The second row would give the token after an accepted guess, which is not used.
    target_probs = jnp.stack([probs, probs])
    guesses = jnp.asarray(guess, jnp.int32)[None]
    return token_verification(accept_key, emit_key, guesses, guessed_probs[None], target_probs)


def _float32(probs: Array, whose: str) -> Float32[Array, "outcomes"]:
    """Converts probabilities to a JAX array (float64 to float32); refuses narrower types."""
    probs = jnp.asarray(probs)
    check_float32(probs, whose)
    return probs


def _check(probs: Array, guessed_probs: Array) -> None:
    if probs.shape != guessed_probs.shape:
        raise InputError(
            f"f gives {probs.shape} probabilities and its approximation {guessed_probs.shape}: "
            "both must have the same outcomes"
        )
