"""Examples of a seqio task by name, and scores of texts with the task's metrics.

The texts are the task's, after its preprocessors. The ids are the model's: its vocabulary replaces
the task's, so that an mT5 can read a T5 task and the task's vocabulary file is never fetched.
"""

import contextlib
import dataclasses
import difflib
import importlib
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_t5x.data.metrics import check_installed, metric_intervals
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary, Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.machine.extras import needed

with needed("seqio"):
    import seqio
    import tensorflow as tf

# Imported after the modules that a user names, so that a name registered there is kept.
PAPER_TASKS = "spec_t5x.data.paper_tasks"

# The seed of seqio's evaluator, for preprocessors that draw random numbers (span corruption).
_EVALUATION_SEED = 42

# TensorFlow only reads data here and must leave the GPU's memory to JAX. If the program has used
# TensorFlow before, the call raises RuntimeError and the devices stay as they are.
with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExample:
    """One example of a task."""

    # The model's input text, prefix included.
    source: str
    # The reference text, before the task's postprocessor.
    target: str
    # All features as numpy arrays, which the task's postprocessor may read.
    features: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExamples:
    """The examples of a task's split, and the task that scores outputs for them."""

    name: str
    examples: list[TaskExample]
    task: seqio.Task

    def score(self, targets: Sequence[TaskExample], predictions: Sequence[str]) -> dict[str, float]:
        """Computes the task's metrics by name, as T5X does, of one prediction for each target.

        The task's postprocessor is applied to both. Metrics of log-likelihoods are left out.
        """
        references, outputs = self._postprocessed(targets, predictions)
        values: dict[str, Any] = {}
        for metric in self.task.predict_metric_fns:
            values |= metric(targets=references, predictions=outputs)
        # seqio's texts and histograms are no figures, and are left out.
        plain = {
            name: value.value if isinstance(value, seqio.metrics.Scalar) else value
            for name, value in values.items()
        }
        return {k: float(value) for k, value in plain.items() if isinstance(value, numbers.Real)}

    def intervals(
        self, targets: Sequence[TaskExample], predictions: Sequence[str]
    ) -> dict[str, tuple[float, float]]:
        """Computes the 95 % interval (low, high) of each of ``score``'s BLEU and ROUGE figures."""
        given = self._postprocessed(targets, predictions)
        values = {}
        for metric in self.task.predict_metric_fns:
            values |= metric_intervals(metric, *given)
        return values

    def _postprocessed(
        self, targets: Sequence[TaskExample], predictions: Sequence[str]
    ) -> tuple[list[Any], list[Any]]:
        def processed(texts, is_target: bool) -> list[Any]:
            pairs = zip(targets, texts, strict=True)
            process = self.task.postprocess_fn
            return [process(text, example=e.features, is_target=is_target) for e, text in pairs]

        return processed([e.target for e in targets], True), processed(predictions, False)


def read_task(
    name: str,
    split: str,
    vocabulary: Vocabulary,
    *,
    lengths: Mapping[str, int] | None = None,
    limit: int | None = None,
    modules: Sequence[str] = (),
    caches: Sequence[str] | None = None,
) -> list[TaskExamples]:
    """Reads a split of a task, or of each task of a mixture, with ``task_or_mixture``'s arguments.

    ``lengths`` is the maximal number of tokens by feature, for preprocessors that use it. ``limit``
    is the number of examples to read of each task, from the first; None reads all.

    Raises:
        InputError: ``task_or_mixture`` fails, the split cannot be read or is empty, or a task
            has no texts or no metric of texts.
    """
    tasks = seqio.get_subtasks(task_or_mixture(name, vocabulary, modules, caches))
    return [read_examples(task, split, lengths, limit, caches is not None) for task in tasks]


def seqio_vocabulary(vocabulary: Vocabulary) -> seqio.Vocabulary:
    """Returns the seqio vocabulary with the same ids; raises ``InputError`` if seqio has none."""
    if isinstance(vocabulary, ByteVocabulary):
        return seqio.ByteVocabulary(vocabulary.extra_ids)
    if not isinstance(vocabulary, SentencePieceVocabulary):
        raise InputError(
            f"seqio has no {type(vocabulary).__name__}: give a model with a SentencePiece "
            "vocabulary, or ByT5"
        )
    return seqio.SentencePieceVocabulary(str(vocabulary.path), vocabulary.extra_ids)


def task_or_mixture(
    name: str,
    vocabulary: Vocabulary,
    modules: Sequence[str] = (),
    caches: Sequence[str] | None = None,
) -> seqio.Task | seqio.Mixture:
    """Returns the task or mixture ``name``, with ``vocabulary``'s ids in all features.

    ``modules`` are imported first, to register tasks. ``caches`` are folders of cached tasks, in
    addition to seqio's; None reads no cache. A mixture keeps its rates.

    Raises:
        InputError: a module cannot be imported, the name is unknown, seqio lacks the
            vocabulary, or a task's cache is needed and absent or has other ids.
    """
    seqio.add_global_cache_dirs(caches or ())
    for module in (*modules, PAPER_TASKS):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise InputError(
                f"cannot import the task module {module} ({error}): install it, or name another"
            ) from error
    known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:6]
        raise InputError(
            f"no task or mixture {name!r}: name the module that registers it, or give one of "
            f"the known ({', '.join(near)})"
        )
    found, ids = seqio.get_mixture_or_task(name), seqio_vocabulary(vocabulary)

    def with_ids(task: seqio.Task) -> seqio.Task:
        _check_cache(task, caches, ids)
        features = {
            key: dataclasses.replace(feature, vocabulary=ids)
            for key, feature in task.output_features.items()
        }
        return task.replace(output_features=features)

    if isinstance(found, seqio.Task):
        return with_ids(found)
    rates = [(with_ids(task), found.get_rate(task)) for task in found.tasks]
    # seqio has no public name for the function that draws a mixture's examples.
    return seqio.Mixture(name, rates, sample_fn=found._sample_fn)


def _check_cache(task: seqio.Task, caches: Sequence[str] | None, ids: seqio.Vocabulary) -> None:
    """Raises ``InputError`` if the cache is required but unused, absent, or has other ids."""
    if caches is None and task.requires_caching:
        raise InputError(f"task {task.name} requires caching: set use_cached_tasks=True")
    if caches is None or not task.supports_caching:
        return
    if not task.cache_dir:
        folders = ", ".join(seqio.utils.get_global_cache_dirs()) or "none is known"
        raise InputError(
            f"task {task.name} is in no folder of cached tasks ({folders}): give "
            "seqio_additional_cache_dirs, or leave use_cached_tasks out"
        )
    for key, feature in task.output_features.items():
        with reading(task.name, key):
            same = _has_ids_of(ids, feature.vocabulary)
        if not same:
            raise InputError(
                f"the cache of task {task.name} has {key} in the ids of {feature.vocabulary}, "
                "which are not the model's: leave use_cached_tasks out, or cache the task with "
                "the model's vocabulary"
            )


def _has_ids_of(ids: seqio.Vocabulary, others: seqio.Vocabulary) -> bool:
    """Says whether each id of ``others`` is the same piece in ``ids``, sentinels aside."""
    if isinstance(others, seqio.PassThroughVocabulary):
        return True
    if type(ids) is not type(others) or others.vocab_size > ids.vocab_size:
        return False
    if not isinstance(ids, seqio.SentencePieceVocabulary):
        return True
    # T5's own file contains the sentinels, which other vocabularies append.
    number = min(each.vocab_size - each.extra_ids for each in (ids, others))
    ours, theirs = (each.tokenizer.id_to_piece(list(range(number))) for each in (ids, others))
    return ours == theirs


def read_features(
    task: seqio.Task,
    split: str,
    lengths: Mapping[str, int] | None,
    limit: int | None = None,
    cached: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields examples' features (numpy arrays) in fixed order; from the cache if ``cached``."""
    with reading(task.name, split):
        dataset = task.get_dataset(
            sequence_length=lengths,
            split=split,
            use_cached=cached,
            shuffle=False,
            num_epochs=1,
            seed=_EVALUATION_SEED,
        )
        dataset = in_order(dataset)
        yield from (dataset if limit is None else dataset.take(limit)).as_numpy_iterator()


def in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with deterministic order, which tf.data's parallel reads would change."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


@contextlib.contextmanager
def reading(name: str, split: str) -> Iterator[None]:
    """Converts errors of the ``with`` block to an ``InputError`` that names task and split."""
    try:
        yield
    except (GeneratorExit, KeyboardInterrupt, InputError):
        raise
    except Exception as error:  # seqio, TFDS and TensorFlow raise assorted types
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"cannot read split {split!r} of task {name} ({reason}): check the split and, "
            "for a TFDS task, that its data can be downloaded or are in TFDS_DATA_DIR"
        ) from error


def read_examples(
    task: seqio.Task,
    split: str,
    lengths: Mapping[str, int] | None,
    limit: int | None,
    cached: bool = False,
) -> TaskExamples:
    """Reads a split of one task; arguments and errors are those of ``read_task``."""
    if not task.predict_metric_fns:
        raise InputError(
            f"task {task.name} has no metric of texts: give another task, or in training leave "
            "train.metrics out"
        )
    check_installed(task.predict_metric_fns)
    examples = []
    for features in read_features(task, split, lengths, limit, cached):
        texts = []
        for key in ("inputs_pretokenized", "targets_pretokenized"):
            if not isinstance(features.get(key), bytes):
                raise InputError(
                    f"task {task.name} has no feature {key}, its text: give a task that keeps it "
                    "(seqio.preprocessors.tokenize does)"
                )
            texts.append(features[key].decode())
        examples.append(TaskExample(source=texts[0], target=texts[1], features=features))
    if not examples:
        raise InputError(f"split {split!r} of task {task.name} is empty: give another")
    return TaskExamples(name=task.name, examples=examples, task=task)
