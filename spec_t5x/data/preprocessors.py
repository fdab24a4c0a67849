"""Preprocessors of the package's seqio tasks."""

from spec_t5x.machine.extras import needed

with needed("seqio"):
    import seqio
    import tensorflow as tf

# The preprocessors that turn the texts ``inputs`` and ``targets`` into ids: a task's last.
TO_IDS = (
    seqio.preprocessors.tokenize,
    seqio.CacheDatasetPlaceholder(),
    seqio.preprocessors.append_eos_after_trim,
)


def prefixed(dataset: tf.data.Dataset, *, source: str, target: str, prefix: str):
    """Makes ``inputs`` of ``prefix`` and the feature ``source``, ``targets`` of ``target``."""

    def to_text_pair(example):
        return {"inputs": tf.strings.join([prefix, example[source]]), "targets": example[target]}

    return dataset.map(to_text_pair, num_parallel_calls=tf.data.AUTOTUNE)
