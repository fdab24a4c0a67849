"""The same weights and token ids in other implementations, in one run and in turn.

``run`` is what ``spec-t5x benchmark neighbours`` calls. Each implementation has a process of
its own (``process``, ``worker``), since each brings threads, allocators and settings that
are not for the others; between two calls all of them are idle. What an implementation must
offer is in ``interface``, and ``ours``, ``with_transformers``, ``with_ctranslate2`` and
``with_t5x`` offer it.
"""
