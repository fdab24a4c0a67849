"""Vocabularies, files of text pairs, metrics and seqio tasks.

``tasks``, ``paper_tasks`` and ``task_examples`` import seqio, and with it TensorFlow. The other
modules need neither, and so import none of these three.
"""
