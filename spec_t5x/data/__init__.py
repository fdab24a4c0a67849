"""Vocabularies, files of text pairs, length-bucketed batches, metrics and seqio tasks.

``tasks``, ``paper_tasks``, ``task_examples`` and ``task_streams`` import seqio, and with it
TensorFlow, so nothing else here imports them; the other modules need neither.
"""
