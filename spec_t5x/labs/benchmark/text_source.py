"""Reading of texts and text pairs, from a file or a seqio task."""

import dataclasses
import itertools
import logging

from spec_t5x.data.text_files import is_jsonl
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.options import TextSource
from spec_t5x.labs.metrics import TextPairs, metric_by_name
from spec_t5x.labs.text_pairs import read_json_pairs, read_pairs, text_lines


def read_sets(source: TextSource, vocabulary: Vocabulary | None) -> list[TextPairs]:
    """Reads the file, the task, or each task of the mixture as one set of pairs.

    A file needs no ``vocabulary``.

    Raises:
      InputError: neither file nor task is given, or cannot be read.
    """
    source.check_given()
    if source.data is not None:
        return [read_file(source)]
    # Imported here: seqio imports TensorFlow, which takes seconds and which a file does not need.
    from spec_t5x.labs.task_scores import read_task

    return read_task(
        source.mixture_or_task,
        source.split,
        vocabulary,
        lengths=source.task_feature_lengths,
        limit=source.limit,
        modules=source.modules,
        caches=source.caches,
    )


def read_texts(
    source: TextSource, generator: Generator, decoding: GenerateOptions, limit: int
) -> list[str]:
    """Reads the first ``limit`` sources that the target takes, or all if there are fewer.

    Of a task, which may be endless, ``limit`` examples are read; a mixture's tasks take turns. A
    warning counts skipped sources.

    Raises:
      InputError: the file or task cannot be read, or has no input that the target takes.
    """
    if source.mixture_or_task:
        source = dataclasses.replace(source, limit=min(limit, source.limit or limit))
    else:
        source = source.without_targets()
    sets = read_sets(source, generator.vocabulary)
    texts, num_skipped = [], 0
    turns = itertools.zip_longest(*(part.pairs for part in sets))
    for text, _ in filter(None, itertools.chain.from_iterable(turns)):
        if len(texts) == limit:
            break
        if fits(generator, text, decoding):
            texts.append(text)
        else:
            num_skipped += 1
    if not texts:
        raise InputError(
            f"{source.name} has no input that the target takes, all are empty or too long: give "
            "another, or pass truncate to cut long ones"
        )
    warn_of_skipped(num_skipped, len(texts) + num_skipped, source.name)
    return texts


def warn_of_skipped(number: int, total: int, name: str) -> None:
    """Warns if a ``number`` of the ``total`` of inputs of a file or task were left out."""
    if number:
        text = "skipped %d of %d inputs of %s, empty or too long: pass truncate to cut long ones"
        logging.getLogger(__name__).warning(text, number, total, name)


def fits(generator: Generator, source: str | list[int], options: GenerateOptions) -> bool:
    """Returns True if the generator takes the text or ids, False if they are empty or too long."""
    try:
        encoded(generator, source, options)
    except InputError:
        return False
    return True


def encoded(generator: Generator, source: str | list[int], options: GenerateOptions) -> list[int]:
    """Returns an input's ids, with ``truncate`` cut to the limit.

    Raises ``InputError`` if the generator does not take them.
    """
    if isinstance(source, str):
        return generator.tokenize(source, options)
    return generator.fit(source, str(source[:8]), options)


def check_readable(source: TextSource) -> None:
    """Raises ``InputError`` unless there is a task, or a file whose sources can be read."""
    source.check_given()
    if source.data is not None:
        read_file(source.without_targets())


def read_file(source: TextSource) -> TextPairs:
    """Reads the file of a source; raises ``InputError`` if it cannot be read as pairs."""
    if is_jsonl(source.data):
        pairs = read_json_pairs(source.data, source.source_field, source.target_field)
    else:
        columns = source.num_columns or next(text_lines(source.data)).count("\t") + 1
        if columns == 1 and source.target_column is None:
            raise InputError(
                f"{source.data} has one column: separate sources and targets by tabs, or give "
                "target_column"
            )
        pairs = read_pairs(source.data, source.source_column, source.target_column, columns)
    # All lines are read, so that a bad one is found at any limit.
    pairs = list(pairs)[: source.limit]
    if source.source_words is not None:
        pairs = [(" ".join(text.split()[: source.source_words]), target) for text, target in pairs]
    # An empty source gets no prefix, so that it is skipped.
    pairs = [(text and source.prefix + text, target) for text, target in pairs]
    return TextPairs(name=source.data, pairs=pairs, metric=metric_by_name(source.metric))
