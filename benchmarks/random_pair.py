"""Target and draft with random weights: the options that commands share, and the models."""

import argparse

from spec_t5x.labs.benchmark.random_models import check_memory, check_vocabulary, random_model
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.names import AUTO, KV, WEIGHTS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of drafting, and those of ``make``."""
    add = parser.add_argument
    add("--alpha", type=float, default=0.75, help="acceptance rate of the drafts (0.75)")
    add("--gamma", nargs="+", type=int, default=[0, 4], help="drafts; 0 is plain decoding (0 4)")
    add("--dtype", default=AUTO, help="type that the networks compute in (auto)")
    add("--weights", default=AUTO, choices=WEIGHTS, help="type of the target's weights (auto)")
    add("--kv", default=AUTO, choices=KV, help="type of the source's keys and values (auto)")


def make(
    target: str, draft: str, args: argparse.Namespace, seed: int = 0
) -> tuple[T5Model, T5Model]:
    """Makes a target and a draft of published sizes, with the arguments of ``add_options``.

    Raises:
      InputError: an unknown size, different vocabularies, or too little memory.
    """
    dtype = resolve_dtype(args.dtype)
    check_vocabulary(target, size(target).vocab_size, [draft])
    check_memory(target, [draft], dtype)
    model = random_model(size(target), dtype, seed, args.weights, args.kv)
    return model, random_model(size(draft), dtype, seed + 1)
