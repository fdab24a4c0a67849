"""Vocabularies, files of text pairs, metrics and seqio tasks.

``tasks``, ``paper_tasks`` and ``task_examples`` import seqio, and with it TensorFlow, so nothing
else here imports them; the other modules need neither.
"""
