"""Reading and writing models: the one place that knows on-disk names.

``loading.load`` reads any supported directory, ``loading.open_model`` opens one and leaves
its weights where they are, ``convert.convert`` writes it in another format. ``native``
holds the project's own format, ``huggingface`` that of transformers, ``t5x_reading`` and
``t5x_writing`` those of T5X. What they share: ``weights`` (read by slices, onto devices),
``validate`` (every name, shape and type), ``vocabularies`` and ``locations`` (gs://).
"""
