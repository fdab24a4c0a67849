"""Speculative decoding inside T5X; nothing else in the package's core imports T5X.

* ``speculation.speculate`` makes a T5X model decode speculatively; a gin include binds ``MODEL``
  to it. ``speculative_model`` has the classes, ``remaking`` makes them of T5X's;
* ``drafts`` describes drafts, ``placing`` shards their parameters, and ``restoring`` restores
  target and draft from two checkpoints;
* ``networks`` reads the configurations of T5X's networks;
* ``acceptance`` writes the statistics to the log and to the output files.
"""
