"""Vocabularies, files of text pairs, length-bucketed batches, metrics and seqio tasks.

``tasks``, ``paper_tasks`` and ``task_examples`` import seqio, and with it TensorFlow, so
nothing here imports them; the other modules need neither.
"""
