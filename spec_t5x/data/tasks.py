"""seqio tasks over tab-separated files, for T5X and for evaluation.

The only module of ``data`` that imports seqio, and with it TensorFlow.
"""

from collections.abc import Sequence
from pathlib import Path

import gin
import seqio
import tensorflow as tf

from spec_t5x.data.metrics import bleu
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
) -> seqio.Task:
    """Registers a text-to-text task with splits train, validation and test.

    Its features are ``inputs`` and ``targets`` (int32 ids that end in EOS) and
    ``inputs_pretokenized`` and ``targets_pretokenized`` (texts, stripped); its
    metric is ``bleu``. Every file is read through once here, so that a bad line is
    found now and not hours into a training.

    Args:
        name: the task's name in ``seqio.TaskRegistry``.
        train_file, dev_file, test_file: tab-separated, gzipped or not, without a
            header; without a test file there is no test split.
        vocabulary_path: a SentencePiece model with pad 0, eos 1, unk 2.
        source_column, target_column: from 0.
        num_columns: the number that every line must have.
        extra_ids: sentinels that the model adds to the vocabulary.

    Returns:
        The registered task.

    Raises:
        InputError: the name is taken, a file is absent, empty, or has a line with
            another number of columns, or the vocabulary is not usable.
    """
    if name in seqio.TaskRegistry.names():
        raise InputError(f"a task {name!r} is registered already: give another name")
    SentencePieceVocabulary(vocabulary_path, extra_ids)  # checks it
    files = {"train": train_file, "validation": dev_file}
    if test_file is not None:
        files["test"] = test_file
    columns = (source_column, target_column)
    num_examples = {
        split: sum(1 for _ in read_pairs(path, *columns, num_columns))
        for split, path in files.items()
    }
    feature = seqio.Feature(
        vocabulary=seqio.SentencePieceVocabulary(vocabulary_path, extra_ids),
        add_eos=True,
    )
    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            _dataset_fn(files, *columns),
            splits=tuple(files),
            num_input_examples=num_examples,
        ),
        preprocessors=[
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[_bleu_metric],
    )


def _dataset_fn(files: dict[str, str], source_column: int, target_column: int):
    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # one file a split: there is nothing to shuffle
        path = Path(files[split])
        lines = tf.data.TextLineDataset(str(path), compression_type="GZIP" if is_gzip(path) else "")
        return lines.map(to_example, num_parallel_calls=tf.data.AUTOTUNE)

    def to_example(line: tf.Tensor) -> dict[str, tf.Tensor]:
        columns = tf.strings.split(line, "\t")
        return {
            "inputs": tf.strings.strip(columns[source_column]),
            "targets": tf.strings.strip(columns[target_column]),
        }

    return dataset_fn


def _bleu_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict:
    return {"bleu": bleu(predictions, targets).score}
