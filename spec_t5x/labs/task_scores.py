"""Examples of a seqio task with their texts, and scores of other texts with the task's metrics."""

import dataclasses
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from spec_t5x.data.task_examples import read_features, task_or_mixture
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.metrics import TextPairs, check_installed, metric_intervals
from spec_t5x.machine.extras import needed
from spec_t5x.types import EOS_ID

with needed("seqio"):
    import seqio


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExample:
    """Reference of one example of a task, as the task's metrics take it."""

    # The reference text, before the task's postprocessor.
    target: str
    # All features as numpy arrays, which the task's postprocessor may read.
    features: Mapping[str, Any]

    def __str__(self) -> str:
        return self.target


def read_task(
    name: str,
    split: str,
    vocabulary: Vocabulary,
    *,
    lengths: Mapping[str, int] | None = None,
    limit: int | None = None,
    modules: Sequence[str] = (),
    caches: Sequence[str] | None = None,
) -> list[TextPairs]:
    """Reads a split of a task, or of each task of a mixture, with ``task_or_mixture``'s arguments.

    ``lengths`` is the maximal number of tokens by feature, for preprocessors that use it. ``limit``
    is the number of examples to read of each task, from the first; None reads all.

    Raises:
        InputError: ``task_or_mixture`` fails, the split cannot be read or is empty, or a task
            has no texts or no metric of texts.
    """
    tasks = seqio.get_subtasks(task_or_mixture(name, vocabulary, modules, caches))
    return [read_examples(task, split, lengths, limit, caches is not None) for task in tasks]


def read_examples(
    task: seqio.Task,
    split: str,
    lengths: Mapping[str, int] | None,
    limit: int | None,
    cached: bool = False,
) -> TextPairs:
    """Reads a split of one task; arguments and errors are those of ``read_task``.

    The targets are ``TaskExample`` objects, and the ids those that the preprocessors made.
    """
    if not task.predict_metric_fns:
        raise InputError(
            f"task {task.name} has no metric of texts: give another task, or in training leave "
            "train.metrics out"
        )
    check_installed(task.predict_metric_fns)
    pairs, ids = [], []
    for features in read_features(task, split, lengths, limit, cached):
        texts = []
        if "inputs" not in features:
            raise InputError(f"task {task.name} has no feature inputs: give another task")
        for key in ("inputs_pretokenized", "targets_pretokenized"):
            if not isinstance(features.get(key), bytes):
                raise InputError(
                    f"task {task.name} has no feature {key}, its text: give a task that keeps it "
                    "(seqio.preprocessors.tokenize does)"
                )
            texts.append(features[key].decode())
        pairs.append((texts[0], TaskExample(target=texts[1], features=features)))
        # An empty source is EOS alone.
        ids.append(features["inputs"].tolist() or [EOS_ID])
    if not pairs:
        raise InputError(f"split {split!r} of task {task.name} is empty: give another")
    metric, intervals = (functools.partial(each, task) for each in (_scores, _intervals))
    return TextPairs(name=task.name, pairs=pairs, metric=metric, ids=ids, intervals=intervals)


def _scores(
    task: seqio.Task, targets: Sequence[TaskExample], predictions: Sequence[str]
) -> dict[str, float]:
    """Computes the task's metrics by name, as T5X does, of one prediction for each target.

    The task's postprocessor is applied to both. Metrics of log-likelihoods are left out.
    """
    references, outputs = _postprocessed(task, targets, predictions)
    values: dict[str, Any] = {}
    for metric in task.predict_metric_fns:
        values |= metric(targets=references, predictions=outputs)
    # seqio's texts and histograms are no figures, and are left out.
    plain = {
        name: value.value if isinstance(value, seqio.metrics.Scalar) else value
        for name, value in values.items()
    }
    return {k: float(value) for k, value in plain.items() if isinstance(value, numbers.Real)}


def _intervals(
    task: seqio.Task, targets: Sequence[TaskExample], predictions: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Computes the 95 % interval (low, high) of each of the BLEU and ROUGE figures."""
    given = _postprocessed(task, targets, predictions)
    values = {}
    for metric in task.predict_metric_fns:
        values |= metric_intervals(metric, *given)
    return values


def _postprocessed(
    task: seqio.Task, targets: Sequence[TaskExample], predictions: Sequence[str]
) -> tuple[list[Any], list[Any]]:
    def processed(texts, is_target: bool) -> list[Any]:
        pairs = zip(targets, texts, strict=True)
        process = task.postprocess_fn
        return [process(text, example=e.features, is_target=is_target) for e, text in pairs]

    return processed([e.target for e in targets], True), processed(predictions, False)
