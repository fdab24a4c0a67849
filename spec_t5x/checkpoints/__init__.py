"""Reading and writing models: the one place that knows on-disk names.

``loading`` lists the formats that are read and ``convert`` those that are written; each is a
folder, whose ``open_model`` makes a ``storage.stored_model.StoredModel``: ``own``,
``huggingface`` and ``t5x``. ``storage`` has what they share: files that are written whole
(``files``), directories and buckets (``locations``), and weights that are checked and read by
slices (``tensors``). ``huggingface.hub`` downloads what is named as on the Hugging Face Hub.
``make_draft`` makes drafts by name. What cannot be read or written is an
``InputError`` of one line.
"""
