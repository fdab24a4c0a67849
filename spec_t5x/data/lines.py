"""Lines of text for language models: read, tokenised, and batched like pairs.

To ``batching`` a line is a pair without a source: its target is the line's tokens and EOS,
and what the model reads is the start token and the line.
"""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from spec_t5x.data.batching import (
    CACHE_FORMAT,
    TokenisedPairs,
    add_file,
    load_tokenised,
    store_tokenised,
)
from spec_t5x.data.tsv import read_pairs
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.types import EOS_ID

_TOKENISE_CHUNK = 20_000  # lines handed to the tokeniser at once


def read_lines(
    files: Sequence[str | Path],
    *,
    columns: Sequence[int] = (0,),
    num_columns: int = 1,
    limit: int | None = None,
) -> Iterator[str]:
    """Yields the texts of the files in order, stripped, without the empty ones.

    Args:
        files: plain text, one example a line, or tab-separated; gzipped or not.
        columns: which of a line's columns are texts, from 0, each of them an example.
        num_columns: the number that every line must have.
        limit: take the first so many texts.

    Raises:
        InputError: as ``tsv.read_pairs``, or there is no file or column.
    """
    if not files or not columns:
        raise InputError(f"files are {list(files)}, columns {list(columns)}: give at least one")
    texts = (text for file in files for text in _texts(file, columns, num_columns))
    return itertools.islice(texts, limit)


def _texts(file: str | Path, columns: Sequence[int], num_columns: int) -> Iterator[str]:
    # Column by column: ``read_pairs`` gives two of a line, and a corpus has seldom more.
    for first, second in itertools.zip_longest(columns[::2], columns[1::2]):
        for pair in read_pairs(file, first, first if second is None else second, num_columns):
            yield from filter(None, pair[: 1 if second is None else 2])


def tokenise_lines(texts: Iterable[str], vocabulary: Vocabulary, max_length: int) -> TokenisedPairs:
    """The lines' ids, each ending in EOS, as pairs without a source.

    Args:
        texts: the lines; empty ones are dropped.
        vocabulary: encodes them.
        max_length: in tokens, EOS included; longer lines are dropped and counted.

    Raises:
        InputError: no line is left.
    """
    ids, lengths, num_dropped, texts = [], [], 0, iter(texts)
    threads = os.cpu_count() or 1
    while chunk := list(itertools.islice(texts, _TOKENISE_CHUNK)):
        encoded = vocabulary.encode_batch(chunk, threads)
        kept = [[*line, EOS_ID] for line in encoded if line and len(line) < max_length]
        num_dropped += len(encoded) - len(kept)
        # One array for each chunk: a corpus has millions of lines.
        ids.append(np.array(list(itertools.chain.from_iterable(kept)), np.int32))
        lengths.extend(map(len, kept))
    if not lengths:
        raise InputError(
            f"all {num_dropped} lines are empty or longer than {max_length} tokens: raise the limit"
        )
    return TokenisedPairs(
        source_ids=np.zeros(0, np.int32),
        source_ends=np.zeros(len(lengths), np.int64),
        target_ids=np.concatenate(ids),
        target_ends=np.cumsum(lengths, dtype=np.int64),
        num_dropped=num_dropped,
    )


def tokenise_cached(
    texts: Iterable[str],
    vocabulary: Vocabulary,
    max_length: int,
    *,
    key: object,
    files: Sequence[str | Path],
    cache_dir: str | Path,
) -> TokenisedPairs:
    """``tokenise_lines``, or what an earlier call kept in ``cache_dir``.

    Args:
        texts, vocabulary, max_length: as ``tokenise_lines``.
        key: says which texts they are, by its ``repr``.
        files: what they are read from; a change in their content is noticed.
        cache_dir: where the arrays are kept.
    """
    digest = hashlib.sha256()
    for file in files:
        # The reader says what is wrong with one that is absent.
        if Path(file).is_file():
            add_file(digest, file)
    settings = (CACHE_FORMAT, vocabulary.segmentation_fingerprint(), max_length, key)
    digest.update(repr(settings).encode())
    cache = Path(cache_dir) / f"lines-{digest.hexdigest()[:24]}.npz"
    if cache.is_file():
        return load_tokenised(cache)
    lines = tokenise_lines(texts, vocabulary, max_length)
    store_tokenised(cache, lines)
    return lines
