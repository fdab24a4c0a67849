"""Baseline of item "public": T5X's own network and decoding, timed in turn with ours, both plain.

T5X is imported when it is timed: few machines have it.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.labs.benchmark.comparison import TimedRounds, time_in_turn
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.machine.extras import needed
from spec_t5x.models.weights import Rounded, TiedTable
from spec_t5x.types import Array

# Name of the baseline where rows of the report name a draft.
NAME = "stock T5X, plain"
NOTE = (
    f"{NAME}: the network and decoding of T5X itself on the same texts; its speed-up is over our "
    "plain decoding, whose tokens/s are beside."
)
# Forms of matrices that T5X does not have.
_ROUNDED = (Rounded, TiedTable)


def is_installed() -> bool:
    """Returns whether there is a T5X, without importing it."""
    return importlib.util.find_spec("t5x") is not None


def measure(
    generator: Generator, texts: Sequence[str], options: GenerateOptions, repeats: int
) -> list[dict[str, Any]]:
    """Times T5X's decoding and ours, without a draft, in turn on the same batches of one text.

    Of ``options`` only temperature, lengths and seed have an effect on T5X.

    Returns:
      A row of a table with ``speed_ups.MEASURED_COLUMNS``, and the seconds of every round; none
      for a target that T5X cannot run: another network, rounded, or with other special ids.

    Raises:
      InputError: T5X cannot be imported.
    """
    stock = _stock_decode(generator, options)
    if stock is None:
        return []
    rounds = [text_batches(generator, texts, options)] * repeats
    times, decoded = time_in_turn(lambda: generator.engine(options).decode, lambda: stock, rounds)
    limit, (ours, theirs) = generator.max_decode_len(options), decoded[-1].values()
    (eos_id,) = generator.vocabulary.eos_ids
    ours = [_ended(one.tokens[0, 0, :limit], eos_id) for one in ours]
    theirs = [_ended(one[0, :limit], eos_id) for one in theirs]
    differ = sum(first != second for first, second in zip(ours, theirs, strict=True))
    found = TimedRounds(
        plain_tokens=sum(map(len, ours)),
        speculative_tokens=sum(map(len, theirs)),
        plain_seconds=times["plain_seconds"],
        speculative_seconds=times["speculative_seconds"],
    )
    measured = times | dataclasses.asdict(found)
    low, high = found.speed_up_range
    texts = f"{differ} differ" if differ else "yes"
    row = {
        "draft": NAME,
        "temperature": options.temperature,
        "plain_tokens_per_second": found.plain_rate,
        "speed_up": found.speed_up,
        "range": f"{low:.2f}–{high:.2f}",
        # Sampled texts are different draws.
        "same_text": texts if options.sampling().greedy else None,
    }
    return [{name.replace("speculative", "stock"): each for name, each in measured.items()} | row]


def _stock_decode(
    generator: Generator, options: GenerateOptions
) -> Callable[[Batch], Array] | None:
    """Returns T5X's decoding of a batch of one text with our parameters; None if it has none."""
    with needed("t5x"):
        from t5x import decoding, models

        from spec_t5x.labs.t5x_training.stock_network import t5x_network
    target, (eos_id, *more_ids) = generator.target, generator.vocabulary.eos_ids
    # Names and types of these parameters are T5X's.
    params = target.params
    # A CPU's rounded weights are unpacked to arrays, a GPU's to rounded ones.
    given = target.weights, params
    leaves = jax.tree.leaves(given, is_leaf=lambda leaf: isinstance(leaf, _ROUNDED))
    rounded = any(isinstance(leaf, _ROUNDED) for leaf in leaves)
    if rounded or target.config.added_rows or more_ids:
        return None
    try:
        network = t5x_network(target.config)
    except InputError:
        return None
    sample = functools.partial(decoding.temperature_sample, temperature=options.temperature, topk=0)
    # The id that ends a text is all that decoding takes of a vocabulary.
    model = models.EncoderDecoderModel(network, None, None, None, decode_fn=sample)

    @jax.jit
    def predict(params, inputs, keys, steps):
        settings = {"eos_id": eos_id, "decode_rng": keys[0], "max_decode_steps": steps}
        arguments = {"decoder_params": settings, "num_decodes": 1}
        return model.predict_batch_with_aux(params, inputs, **arguments)[0]

    def decode(batch: Batch) -> Array:
        room = np.zeros((1, generator.room(batch, options)), np.int32)
        inputs = {"encoder_input_tokens": batch.tokens, "decoder_input_tokens": room}
        return predict(params, inputs, batch.keys, batch.max_decode_steps)

    return decode


def _ended(tokens: Array, eos_id: int) -> list[int]:
    """Returns the ids up to the first end of sequence, or all; id 0 may be a token."""
    ids = np.asarray(tokens).tolist()
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids
