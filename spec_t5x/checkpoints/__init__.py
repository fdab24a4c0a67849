"""Reading, writing and conversion of checkpoints.

``loading`` reads a checkpoint of any of the ``formats``, and ``convert`` writes it in another one.
``native``, ``huggingface`` and ``t5x`` implement the formats on top of ``storage``. ``make_draft``
makes drafts by name. If a checkpoint cannot be read or written, an ``InputError`` is raised.
"""
