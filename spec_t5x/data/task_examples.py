"""Seqio tasks by name, and their examples, with the ids of a model.

A task's texts are its own, after its preprocessors. The model's vocabulary replaces the task's, so
that an mT5 can read a T5 task and the task's vocabulary file is never fetched.
"""

import contextlib
import dataclasses
import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary, Vocabulary
from spec_t5x.errors import InputError, as_input_error
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
    name: str, vocabulary: Vocabulary, modules: Sequence[str], caches: Sequence[str] | None
) -> seqio.Task | seqio.Mixture:
    """Returns the task or mixture ``name``, with ``vocabulary``'s ids in all features.

    ``modules`` are imported first, to register tasks. ``caches`` are folders of cached tasks, in
    addition to seqio's; None reads no cache. A mixture keeps its rates. Raises ``InputError`` if a
    module cannot be imported, the name is unknown, seqio lacks the vocabulary, or a task's cache is
    needed and absent or has other ids.
    """
    check_registered(name, modules)
    seqio.add_global_cache_dirs(caches or ())
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


def check_registered(name: str, modules: Sequence[str]) -> None:
    """Raises ``InputError`` for a module that cannot be imported, or a name none registers."""
    for module in (*modules, PAPER_TASKS):
        remedy = "install it, or name another"
        with as_input_error(f"cannot import the task module {module}", remedy, ImportError):
            importlib.import_module(module)
    known = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:6]
        raise InputError(
            f"no task or mixture {name!r}: name the module that registers it, or give one of "
            f"the known ({', '.join(near)})"
        )


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


def reading(name: str, split: str) -> contextlib.AbstractContextManager[None]:
    """Converts errors of the ``with`` block to an ``InputError`` that names task and split."""
    return as_input_error(
        f"cannot read split {split!r} of task {name}",
        "check the split and, for a TFDS task, that its data can be downloaded or are in "
        "TFDS_DATA_DIR",
        Exception,
    )
