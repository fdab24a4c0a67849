"""Bulk inference that survives: many inputs in, numbered shards of answers out.

A run that is killed at any moment and started again finishes with the same bytes as one
that was left alone. ``run`` has the whole of it; in the order of the data's way:

* ``options``: what a run is told;
* ``inputs``, ``tasks``: files and seqio tasks as streams of inputs;
* ``fingerprints``, ``manifest``: what a run is made of, so that no two are mixed;
* ``locks``, ``hosts``: one run in a directory, several processes in a run;
* ``placement``, ``answering``, ``records``: inputs to answers to lines;
* ``shards``, ``atomic``: lines to files, whole or not at all;
* ``progress``, ``signals``: what a person sees, and how a run is stopped.
"""
