"""Reading and writing models: the one place that knows on-disk names.

``loading.load`` reads any supported directory, ``native`` holds the project's own
format, ``huggingface`` that of transformers.
"""
