"""A seqio task; the launches name this module as ``MIXTURE_OR_TASK_MODULE``."""

import os

import seqio
import tensorflow as tf

TEXTS = [
    "The cat sleeps under the old table.",
    "My sister reads a book in the garden.",
    "Nobody knows where the keys are.",
    "The children play football after school.",
    "It is raining and the street is wet.",
]
SPLITS = ("train", "validation", "test")
VOCABULARY = seqio.SentencePieceVocabulary(os.environ["LAUNCH_VOCABULARY"], extra_ids=0)


def _dataset(split, shuffle_files, seed=None):
    del split, shuffle_files, seed
    return tf.data.Dataset.from_tensor_slices({"inputs": TEXTS, "targets": TEXTS[::-1]})


def _share_of_equals(targets, predictions):
    return {"equal": sum(map(str.__eq__, targets, predictions)) / len(targets)}


seqio.TaskRegistry.add(
    "launch",
    source=seqio.FunctionDataSource(
        _dataset, splits=SPLITS, num_input_examples=dict.fromkeys(SPLITS, len(TEXTS))
    ),
    preprocessors=[
        seqio.preprocessors.tokenize,
        seqio.CacheDatasetPlaceholder(),
        seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={
        name: seqio.Feature(vocabulary=VOCABULARY, add_eos=True) for name in ("inputs", "targets")
    },
    metric_fns=[_share_of_equals],
)
