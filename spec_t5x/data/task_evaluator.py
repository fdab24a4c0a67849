"""Scoring a model in training on tasks: their metrics, and files of predictions."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import seqio
import tensorflow as tf

from spec_t5x.data.metrics import Metric
from spec_t5x.data.task_examples import read_examples, seqio_vocabulary
from spec_t5x.data.vocabulary import Vocabulary, ids_before_eos
from spec_t5x.errors import InputError
from spec_t5x.machine.atomic import write_whole

# Ids of the outputs that a model writes for the ids of some sources, EOS included in both.
Write = Callable[[Sequence[list[int]]], Sequence[Sequence[int]]]

PREDICTIONS_NAME = "predictions"


class TaskEvaluator:
    """Tasks' examples, kept in memory, to be answered again and again."""

    def __init__(
        self,
        tasks: Sequence[seqio.Task],
        split: str,
        lengths: Mapping[str, int],
        directory: str | Path,
        examples: int | None = None,
    ):
        """Reads the examples.

        Args:
            tasks: with the model's ids (``task_examples.with_vocabulary``).
            split: of each task.
            lengths: tokens that ``inputs`` and ``targets`` are cut to.
            directory: ``predictions/`` is made in it, with ``TASK-STEP.jsonl`` of all texts.
            examples: take the first so many of each task.

        Raises:
            InputError: a task without texts or a metric of texts, or what cannot be read.
        """
        self._tasks = [read_examples(task, split, lengths, examples) for task in tasks]
        self._folder = Path(directory) / PREDICTIONS_NAME
        self._folder.mkdir(parents=True, exist_ok=True)

    def evaluate(self, step: int, write: Write) -> dict[str, dict[str, float]]:
        """The figures of each task.

        ``step`` is for the files' names; ``write``, the model, is called once for each task.

        Raises:
            InputError: the predictions cannot be written.
        """
        figures = {}
        for task in self._tasks:
            outputs = write([each.features["inputs"].tolist() for each in task.examples])
            vocabulary = task.task.output_features["targets"].vocabulary
            size = vocabulary.vocab_size
            texts = [vocabulary.decode(ids_before_eos(ids, size)) for ids in outputs]
            figures[task.name] = task.score(task.examples, texts)
            path = self._folder / f"{task.name}-{step:06}.jsonl"
            lines = (
                # As seqio's JSONLogger names them.
                {
                    "input": {"inputs_pretokenized": each.source},
                    "prediction": text,
                    "target": each.target,
                }
                for each, text in zip(task.examples, texts, strict=True)
            )
            try:
                write_whole(path, (json.dumps(line).encode() + b"\n" for line in lines))
            except OSError as error:
                raise InputError(
                    f"{path} cannot be written ({error.strerror}): free some space, and run the "
                    "command again"
                ) from error
        return figures


def text_task(
    name: str, pairs: Sequence[tuple[str, str]], vocabulary: Vocabulary, metric: Metric
) -> seqio.Task:
    """A task of one split, ``validation``, that is in no registry; ``pairs`` have prefixes.

    Raises:
        InputError: there are no pairs, or seqio has no such vocabulary.
    """
    if not pairs:
        raise InputError(f"{name} has no pair with a source: give a file with text to score on")
    feature = seqio.Feature(vocabulary=seqio_vocabulary(vocabulary), add_eos=True)
    sides = dict(zip(("inputs", "targets"), map(list, zip(*pairs, strict=True)), strict=True))

    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del split, shuffle_files, seed
        return tf.data.Dataset.from_tensor_slices(sides)

    return seqio.Task(
        # seqio wants names of letters, digits and a few signs.
        "".join(sign if sign.isalnum() else "_" for sign in name),
        source=seqio.FunctionDataSource(dataset_fn, splits=("validation",)),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[metric],
    )
