"""Resumable bulk inference: many inputs in, numbered shards of answers out.

A run that is killed at any moment and started again finishes with the same bytes as one
that was left alone. In the order of the data's way:

* ``bulk``: the run, start to finish; ``infer_options``: its options;
* ``sources``, ``task_source``: files and seqio tasks as streams of inputs;
* ``processes``, ``signals``: one run in a directory, several workers in a run, stopping;
* ``placement``, ``answering``: inputs to answers to lines;
* ``run_directory``: lines to files, whole or not at all;
* ``decoding_progress``: the progress that a user sees.
"""
