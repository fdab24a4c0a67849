"""Vocabularies, text files, metrics and seqio tasks.

``preprocessors``, ``paper_tasks`` and ``task_examples`` import seqio, and with it TensorFlow. The
other modules need neither, and so import none of these three.
"""
