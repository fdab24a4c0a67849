"""Scoring a model on tasks by ``seqio.Evaluator``: their metrics, and files of predictions."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import seqio
import tensorflow as tf

from spec_t5x.data.metrics import Metric
from spec_t5x.data.task_examples import in_order, numbers_of, reading, seqio_vocabulary
from spec_t5x.data.vocabulary import Vocabulary, ids_before_eos
from spec_t5x.errors import InputError
from spec_t5x.types import EOS_ID, PAD_ID

# Ids of the texts that a model writes for the ids of some sources, EOS included in both.
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
            directory: ``predictions/`` is made in it, with what seqio's ``JSONLogger`` writes:
                ``TASK-metrics.jsonl``, and ``TASK-STEP.jsonl`` with all texts.
            examples: take the first so many of each task.

        Raises:
            InputError: a task without a metric of texts, or what cannot be read.
        """
        for task in tasks:
            if not task.predict_metric_fns:
                raise InputError(
                    f"task {task.name} has no metric of texts: give another task, or leave "
                    "train.metrics out"
                )
        names = ", ".join(task.name for task in tasks)
        self._vocab_size = tasks[0].output_features["targets"].vocabulary.vocab_size
        folder = Path(directory) / PREDICTIONS_NAME
        folder.mkdir(parents=True, exist_ok=True)
        with reading(names, split), _registered(tasks) as name:
            self._evaluator = seqio.Evaluator(
                name,
                _SourcesAsTheyAre(),
                eval_split=split,
                sequence_length=dict(lengths),
                num_examples=examples,
                logger_cls=[seqio.JSONLogger],
                log_dir=str(folder),
                async_compute_metrics=False,
            )

    def evaluate(self, step: int, write: Write) -> dict[str, dict[str, float]]:
        """The figures of each task.

        Args:
            step: of the training, for the files' names.
            write: the model; called once for each task.
        """

        def predict(examples: tf.data.Dataset) -> list[tuple[int, list[int]]]:
            places, sources = [], []
            for place, example in in_order(examples).as_numpy_iterator():
                places.append(int(place))
                sources.append(example["encoder_input_tokens"].tolist())
            return list(zip(places, self._of_one_length(write(sources)), strict=True))

        metrics, _ = self._evaluator.evaluate(compute_metrics=True, step=step, predict_fn=predict)
        return {name: numbers_of(values) for name, values in metrics.result().items()}

    def _of_one_length(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The ids that a text is decoded of, then EOS and padding: seqio makes an array."""
        kept = [ids_before_eos(text, self._vocab_size) for text in texts]
        width = max(map(len, kept)) + 1
        return [[*ids, EOS_ID, *[PAD_ID] * (width - len(ids) - 1)] for ids in kept]


def text_task(
    name: str, pairs: Sequence[tuple[str, str]], vocabulary: Vocabulary, metric: Metric
) -> seqio.Task:
    """A task of one split, ``validation``, that is in no registry.

    Args:
        name: names its files of predictions.
        pairs: texts, prefixes included.
        vocabulary: the model's.
        metric: scores the texts.

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


class _SourcesAsTheyAre(seqio.FeatureConverter):
    """A source's ids without padding: the model's batches are made elsewhere."""

    TASK_FEATURES = {
        "inputs": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
        "targets": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
    }
    MODEL_FEATURES = {"encoder_input_tokens": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)}

    def __init__(self):
        super().__init__(pack=False)

    def __call__(self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]):
        del task_feature_lengths  # the task has cut them
        return ds.map(lambda example: {"encoder_input_tokens": example["inputs"]})

    def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]):
        return {"encoder_input_tokens": task_feature_lengths["inputs"]}

    def _convert_features(self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]):
        return self(ds, task_feature_lengths)


@contextlib.contextmanager
def _registered(tasks: Sequence[seqio.Task]) -> Iterator[str]:
    """A mixture of the tasks, for the while: seqio's evaluator takes no object."""
    name = f"evaluated_{uuid.uuid4().hex}"
    seqio.MixtureRegistry.add_provider(name, seqio.Mixture(name, [(task, 1.0) for task in tasks]))
    try:
        yield name
    finally:
        seqio.MixtureRegistry.remove(name)
