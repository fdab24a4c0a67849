"""Vocabularies, tab-separated files, length-bucketed batches and seqio tasks.

``vocabulary``, ``tsv`` and ``batching`` need neither seqio nor TensorFlow;
``tasks`` imports both, so nothing here imports it.
"""
