"""seqio tasks over local files, for T5X and for evaluation.

Of the modules of ``data`` that import seqio, and with it TensorFlow (see there).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gin
import seqio
import tensorflow as tf

from spec_t5x.data.jsonl import read_json_pairs
from spec_t5x.data.metrics import Metric, metric_by_name
from spec_t5x.data.tsv import is_gzip, read_pairs
from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.errors import InputError


@gin.configurable(module="spec_t5x.data.tasks")
def register_tsv_task(
    name: str,
    train_file: str,
    dev_file: str,
    vocabulary_path: str,
    source_column: int = 0,
    target_column: int = 1,
    num_columns: int = 2,
    test_file: str | None = None,
    extra_ids: int = 0,
    prefix: str = "",
    metric: str = "bleu",
) -> seqio.Task:
    """Registers a text-to-text task with splits train, validation and test.

    Its features are ``inputs`` and ``targets`` (int32 ids that end in EOS) and
    ``inputs_pretokenized`` and ``targets_pretokenized`` (texts, stripped). Every file
    is read through once here, so that a bad line is found now and not hours into a
    training.

    Args:
        name: the task's name in ``seqio.TaskRegistry``.
        train_file, dev_file, test_file: tab-separated, gzipped or not, without a
            header; without a test file there is no test split.
        vocabulary_path: a SentencePiece model with pad 0, eos 1, unk 2.
        source_column, target_column: from 0.
        num_columns: the number that every line must have.
        extra_ids: sentinels that the model adds to the vocabulary.
        prefix: put before every source ("translate English to German: ").
        metric: "bleu", "bleu_intl" (BLEU as T5 reports it) or "rouge".

    Returns:
        The registered task.

    Raises:
        InputError: the name is taken, a file is absent, empty, or has a line with
            another number of columns, or vocabulary or metric are not usable.
    """
    files = _files(train_file, dev_file, test_file)
    columns = (source_column, target_column)

    def to_example(line: tf.Tensor) -> dict[str, tf.Tensor]:
        # As ``tsv.text_lines`` has it.
        texts = tf.strings.split(tf.strings.regex_replace(line, "^\ufeff", ""), "\t")
        return {
            "inputs": tf.strings.strip(texts[source_column]),
            "targets": tf.strings.strip(texts[target_column]),
        }

    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # one file a split: there is nothing to shuffle
        path = Path(files[split])
        lines = tf.data.TextLineDataset(str(path), compression_type="GZIP" if is_gzip(path) else "")
        return lines.map(to_example, num_parallel_calls=tf.data.AUTOTUNE)

    return _register(
        name,
        dataset_fn,
        {
            split: lambda path=path: read_pairs(path, *columns, num_columns)
            for split, path in files.items()
        },
        vocabulary_path,
        extra_ids,
        prefix,
        metric_by_name(metric),
    )


@gin.configurable(module="spec_t5x.data.tasks")
def register_jsonl_task(
    name: str,
    train_file: str,
    dev_file: str,
    vocabulary_path: str,
    source_field: str = "article",
    target_field: str = "highlights",
    test_file: str | None = None,
    extra_ids: int = 0,
    prefix: str = "summarize: ",
    metric: str = "rouge",
) -> seqio.Task:
    """``register_tsv_task`` for files of JSON objects, one a line.

    The defaults are those of CNN/DailyMail.

    Args:
        source_field, target_field: names of the fields that hold the texts.
        name, train_file, dev_file, test_file, vocabulary_path, extra_ids, prefix, metric:
            as in ``register_tsv_task``.

    Raises:
        InputError: the name is taken, a file is absent, empty, or has a line without
            these fields, or vocabulary or metric are not usable.
    """
    files = _files(train_file, dev_file, test_file)
    readers = {
        split: lambda path=path: read_json_pairs(path, source_field, target_field)
        for split, path in files.items()
    }

    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # one file a split: there is nothing to shuffle
        # TensorFlow reads no JSON: Python does, pair by pair.
        text = tf.TensorSpec((), tf.string)
        pairs = tf.data.Dataset.from_generator(readers[split], output_signature=(text, text))
        return pairs.map(lambda source, target: {"inputs": source, "targets": target})

    return _register(
        name, dataset_fn, readers, vocabulary_path, extra_ids, prefix, metric_by_name(metric)
    )


def prefixed(dataset: tf.data.Dataset, *, source: str, target: str, prefix: str):
    """A preprocessor: ``inputs`` are ``prefix`` and the feature ``source``, ``targets``
    are the feature ``target``."""

    def to_text_pair(example):
        return {"inputs": tf.strings.join([prefix, example[source]]), "targets": example[target]}

    return dataset.map(to_text_pair, num_parallel_calls=tf.data.AUTOTUNE)


def _files(train: str, dev: str, test: str | None) -> dict[str, str]:
    files = {"train": train, "validation": dev}
    return files if test is None else files | {"test": test}


def _register(
    name: str,
    dataset_fn: Callable[..., tf.data.Dataset],
    readers: Mapping[str, Callable[[], Iterator[tuple[str, str]]]],
    vocabulary_path: str,
    extra_ids: int,
    prefix: str,
    metric: Metric,
) -> seqio.Task:
    """Reads all files through, and registers."""
    if name in seqio.TaskRegistry.names():
        raise InputError(f"a task {name!r} is registered already: give another name")
    SentencePieceVocabulary(vocabulary_path, extra_ids)  # checks it
    num_examples = {split: sum(1 for _ in read()) for split, read in readers.items()}
    feature = seqio.Feature(
        vocabulary=seqio.SentencePieceVocabulary(vocabulary_path, extra_ids),
        add_eos=True,
    )

    def add_prefix(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return prefixed(dataset, source="inputs", target="targets", prefix=prefix)

    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            dataset_fn,
            splits=tuple(readers),
            num_input_examples=num_examples,
        ),
        preprocessors=[
            *([add_prefix] if prefix else []),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[metric],
    )
