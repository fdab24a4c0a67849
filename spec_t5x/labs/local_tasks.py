"""seqio tasks over local files, for T5X and for evaluation.

The module imports seqio, and with it TensorFlow.
"""

import functools
from collections.abc import Callable, Iterator

import gin

from spec_t5x.data.preprocessors import TO_IDS, prefixed
from spec_t5x.data.text_files import holds_gzip, opened
from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.metrics import metric_by_name
from spec_t5x.labs.text_pairs import read_json_pairs, read_pairs
from spec_t5x.machine.extras import needed
from spec_t5x.machine.paths import expanded

with needed("seqio"):
    import seqio
    import tensorflow as tf


@gin.configurable(module="spec_t5x.labs.local_tasks")
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
    """Registers a text-to-text task over tab-separated files, and returns it.

    Its features are ``inputs`` and ``targets`` (int32 ids that end in EOS) and
    ``inputs_pretokenized`` and ``targets_pretokenized`` (texts, stripped). Every file is read
    once here, so that a bad line is found now and not hours into a training.

    Args:
        name: the task's name in ``seqio.TaskRegistry``.
        train_file, dev_file, test_file: the splits train, validation and test, gzipped or
            not, without header. If ``test_file`` is None, there is no test split.
        vocabulary_path: a SentencePiece model with pad 0, eos 1, unk 2.
        source_column, target_column: columns of the pair, counted from 0.
        num_columns: number of columns that every line must have.
        extra_ids: number of sentinels to append to the vocabulary.
        prefix: text in front of every source ("translate English to German: ").
        metric: "bleu", "bleu_intl" (BLEU as T5 reports it) or "rouge".

    Raises:
        InputError: the name is taken, a file is absent, empty, or has a line with
            another number of columns, or vocabulary or metric are not usable.
    """

    def read(path: str) -> Iterator[tuple[str, str]]:
        return read_pairs(path, source_column, target_column, num_columns)

    def to_example(line: tf.Tensor) -> dict[str, tf.Tensor]:
        # Removes a byte order mark, as ``text_files.text_of`` does.
        texts = tf.strings.split(tf.strings.regex_replace(line, "^\ufeff", ""), "\t")
        return {
            "inputs": tf.strings.strip(texts[source_column]),
            "targets": tf.strings.strip(texts[target_column]),
        }

    # By TensorFlow, not ``read``: T5X's save_dataset cannot save the position of a generator.
    def dataset(path: str) -> tf.data.Dataset:
        with opened(path) as stream:
            compression = "GZIP" if holds_gzip(stream) else ""
        lines = tf.data.TextLineDataset(str(path), compression_type=compression)
        return lines.map(to_example, num_parallel_calls=tf.data.AUTOTUNE)

    files = (train_file, dev_file, test_file)
    return _register(name, files, read, dataset, vocabulary_path, extra_ids, prefix, metric)


@gin.configurable(module="spec_t5x.labs.local_tasks")
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
    """Registers a text-to-text task over files of one JSON object per line, and returns it.

    ``source_field`` and ``target_field`` name the objects' texts; the defaults are
    CNN/DailyMail's. Other arguments and errors are those of ``register_tsv_task``.
    """

    def read(path: str) -> Iterator[tuple[str, str]]:
        return read_json_pairs(path, source_field, target_field)

    def dataset(path: str) -> tf.data.Dataset:
        # TensorFlow cannot read JSON, so Python reads the pairs.
        text = tf.TensorSpec((), tf.string)
        pairs = tf.data.Dataset.from_generator(lambda: read(path), output_signature=(text, text))
        return pairs.map(lambda source, target: {"inputs": source, "targets": target})

    files = (train_file, dev_file, test_file)
    return _register(name, files, read, dataset, vocabulary_path, extra_ids, prefix, metric)


def _register(
    name: str,
    files: tuple[str, str, str | None],
    read: Callable[[str], Iterator[tuple[str, str]]],
    dataset: Callable[[str], tf.data.Dataset],
    vocabulary_path: str,
    extra_ids: int,
    prefix: str,
    metric: str,
) -> seqio.Task:
    """Registers a task of the splits' ``files``, after ``read`` has checked all lines of each."""
    if name in seqio.TaskRegistry.names():
        raise InputError(f"a task {name!r} is registered already: give another name")
    SentencePieceVocabulary(vocabulary_path, extra_ids)  # checks it
    scored = metric_by_name(metric)
    splits = zip(("train", "validation", "test"), files, strict=True)
    paths = {split: str(expanded(path)) for split, path in splits if path is not None}
    feature = seqio.Feature(
        vocabulary=seqio.SentencePieceVocabulary(vocabulary_path, extra_ids), add_eos=True
    )

    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # one file a split: there is nothing to shuffle
        return dataset(paths[split])

    add_prefix = functools.partial(prefixed, source="inputs", target="targets", prefix=prefix)
    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            dataset_fn,
            splits=tuple(paths),
            num_input_examples={s: sum(1 for _ in read(path)) for s, path in paths.items()},
        ),
        preprocessors=[*([add_prefix] if prefix else []), *TO_IDS],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[scored],
    )
