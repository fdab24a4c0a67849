"""Speculative decoding inside T5X: models, drafts and checkpoints for its launches.

T5X is imported by these modules alone; nothing else of the package needs it.

* ``speculation.speculate`` makes a T5X model decode speculatively: what a gin include
  binds ``MODEL`` to;
* ``speculative_model`` has the models, and ``remaking`` makes them of T5X's;
* ``drafts`` describes drafts and places their parameters in the model's tree, ``placing`` on
  the mesh;
* ``restoring`` restores target and draft from two checkpoints;
* ``initial_weights`` starts a training from weights alone;
* ``networks`` has T5X's networks as the package's own, and the way back;
* ``acceptance`` brings the statistics to the log and to the output files.
"""
