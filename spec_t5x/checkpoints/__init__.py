"""Reading and writing models: the one place that knows on-disk names.

``loading`` opens a checkpoint of any of the ``formats`` and ``convert`` writes one; ``native``,
``huggingface`` and ``t5x`` hold the formats, and ``storage`` what these share. ``make_draft`` makes
drafts by name. A checkpoint that cannot be read or written is an ``InputError`` of one line.
"""
