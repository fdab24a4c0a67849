"""Resumable bulk inference: many inputs in, numbered shards of answers out.

A run that is killed at any moment and started again writes the same bytes as an uninterrupted
run. The modules, in the order in which data passes through them:

* ``bulk``: a run from start to finish; ``infer_options``: its options;
* ``sources``, ``task_source``: files and seqio tasks as streams of inputs;
* ``processes``, ``signals``: locks of a run's workers, and its end by a signal;
* ``placement``, ``answering``: the models' devices, and inputs decoded to lines of JSON;
* ``run_directory``: the files of a run, each written whole or not at all;
* ``decoding_progress``: the progress bar.
"""
