"""Batches of texts in their order, for what is measured batch by batch."""

from collections.abc import Sequence

from spec_t5x.generation import Batch, GenerateOptions, Generator


def text_batches(
    generator: Generator, texts: Sequence[str], options: GenerateOptions, first: int = 0
) -> list[Batch]:
    """Returns batches of ``options.batch_size`` inputs, in order.

    An input's random key is that of its place, ``first`` plus its index in ``texts``, so that a
    sampled text does not depend on its batch.
    """
    ids = [generator.tokenize(text, options) for text in texts]
    places, size = range(first, first + len(texts)), options.batch_size
    return [
        generator.make_batch(texts[i : i + size], ids[i : i + size], places[i : i + size], options)
        for i in range(0, len(texts), size)
    ]
