"""Times the blocks of decoder layers on a GPU: by XLA, and by the kernels of ``contrib/gpu``.

    python -m benchmarks.gpu_blocks --size t5_1_1_xxl --tokens 1 8 --json gpu_blocks.json

A program runs one block of all layers ``--steps`` times, each on the states of the one before, so
that its launch is a small part. Rounds of the programs are interleaved, and times are medians.
Weights are random. On a CPU, JAX's interpreter runs the kernels: a test of this script.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import command
from benchmarks.gpu_launches import BY
from spec_t5x.errors import InputError, check_at_least
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.random_models import check_fits, random_model, random_sources
from spec_t5x.machine import xla_flags
from spec_t5x.machine.description import machine
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.attention import after_texts, mask_bias
from spec_t5x.models.cache import DecoderCache
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import Transformer
from spec_t5x.names import AUTO, KV, WEIGHTS
from spec_t5x.types import Array

State = tuple[Array, DecoderCache]


def to_text(network: Transformer, states: Array, cache: DecoderCache) -> State:
    """Runs all layers' self-attention."""
    decoder, layers = network.decoder, []
    tokens = after_texts(cache, states.shape[1], decoder.relpos_bias)
    for layer, kept in zip(decoder.layers, cache.layers, strict=True):
        states, kept = layer.attend_to_cache(states, kept, tokens, None)
        layers.append(kept)
    return states, cache.replace(layers=tuple(layers))


def to_source(network: Transformer, states: Array, cache: DecoderCache) -> State:
    """Runs all layers' attention to the source."""
    bias = mask_bias(cache.source_mask)[:, None, None, :]
    for layer, kept in zip(network.decoder.layers, cache.layers, strict=True):
        states = layer.attend_to_source(states, kept, bias)
    return states, cache


def feed_forward(network: Transformer, states: Array, cache: DecoderCache) -> State:
    """Runs all layers' feed-forward blocks."""
    for layer in network.decoder.layers:
        states = layer.feed_forward(states)
    return states, cache


def output_layer(network: Transformer, states: Array, cache: DecoderCache) -> State:
    """Computes logits; the new states depend on all of them."""
    largest = jnp.max(network.logits(states), axis=-1, keepdims=True)
    return states + 1e-6 * largest.astype(states.dtype), cache


BLOCKS: dict[str, Callable[[Transformer, Array, DecoderCache], State]] = {
    "attention to text": to_text,
    "attention to source": to_source,
    "feed-forward": feed_forward,
    "output layer": output_layer,
}


@functools.partial(jax.jit, static_argnames=("block", "steps"), donate_argnames="cache")
def run(model: T5Model, states: Array, cache: DecoderCache, *, block: str, steps: int) -> State:
    """Runs one block of all layers ``steps`` times."""

    def step(_, carry):
        return model.apply(*carry, method=BLOCKS[block])

    return lax.fori_loop(0, steps, step, (states, cache))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON if asked to; returns 0, or 2 on an input error."""
    parser = command.parser("gpu_blocks", __doc__)
    add = parser.add_argument
    add("--size", default="t5_1_1_small", help="published size (t5_1_1_small)")
    add("--batch", type=int, default=1, help="rows of the batch (1)")
    add("--tokens", nargs="+", type=int, default=[1, 8], help="tokens of a row in a call (1 8)")
    add("--source_len", type=int, default=512, help="tokens of a source (512)")
    add("--max_decode_len", type=int, default=128, help="room for a text; half is filled (128)")
    add("--dtype", default=AUTO, help="type that the network computes in (auto)")
    add("--weights", default=AUTO, choices=WEIGHTS, help="type of the weights (auto)")
    add("--kv", default=AUTO, choices=KV, help="type of the source's keys and values (auto)")
    add("--steps", type=int, default=20, help="calls of a block in a program (20)")
    add("--repeats", type=int, default=9, help="rounds (9)")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    args = parser.parse_args(arguments)
    xla_flags.apply()
    settings = {"machine": machine(), **command.options(args)}
    return command.run("gpu_blocks", args, measure(args), table, settings)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the microseconds of a layer's block for each number of tokens, as JSON values.

    Raises:
      InputError: a number below 1, an unknown size, or too little memory.
    """
    check_at_least(args, batch=1, source_len=1, max_decode_len=1, steps=1, repeats=1)
    if min(args.tokens) < 1 or 2 * max(args.tokens) > args.max_decode_len:
        raise InputError(f"tokens is {args.tokens}: give 1 to half of {args.max_decode_len}")
    dtype = resolve_dtype(args.dtype)
    check_fits(args.size, [], dtype)
    model = random_model(size(args.size), dtype, 0, args.weights, args.kv)
    sources = random_sources(model, args.batch, args.source_len, 0)
    cache = jax.jit(T5Model.prefill, static_argnums=2)(model, sources, args.max_decode_len)
    cache = cache.at(jnp.full(args.batch, args.max_decode_len // 2, jnp.int32))
    for block, tokens in itertools.product(BLOCKS, args.tokens):
        states = jnp.ones((args.batch, tokens, model.config.emb_dim), dtype)
        calls = {
            name: _Program(model.replace(operations=by), states, block, args.steps)
            for name, by in BY.items()
        }
        for call in calls.values():
            cache = call(cache)  # Compiles.
        for call in list(calls.values()) * args.repeats:
            cache = call(cache)
        layers = 1 if block == "output layer" else model.num_layers
        yield {
            "block": block,
            "tokens": tokens,
            "microseconds": {
                name: 1e6 * statistics.median(call.seconds[1:]) / args.steps / layers
                for name, call in calls.items()
            },
            "rounds": {name: call.seconds[1:] for name, call in calls.items()},
        }


@dataclasses.dataclass
class _Program:
    """Program of one block, and the seconds of its calls."""

    model: T5Model
    states: Array
    block: str
    steps: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def __call__(self, cache: DecoderCache) -> DecoderCache:
        start = time.perf_counter()
        found = run(self.model, self.states, cache, block=self.block, steps=self.steps)
        states, cache = jax.block_until_ready(found)
        self.seconds.append(time.perf_counter() - start)
        return cache


def table(rows: Sequence[dict[str, Any]]) -> results.Table:
    """Makes a table with a line for each block and number of tokens."""

    def of(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['microseconds'][name]:.1f}"

    def ratio(row: dict[str, Any]) -> str:
        by_xla, by_kernels = (row["microseconds"][name] for name in BY)
        return f"{by_xla / by_kernels:.2f}"

    columns = {
        "block": lambda row: row["block"],
        "tokens": lambda row: str(row["tokens"]),
        **{f"{name}, µs": of(name) for name in BY},
        "times as fast": ratio,
    }
    return results.table(columns, rows, "Microseconds of one layer.")


if __name__ == "__main__":
    sys.exit(main())
