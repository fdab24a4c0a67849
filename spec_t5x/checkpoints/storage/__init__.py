"""Files, locations, tensors and vocabularies, as all formats of checkpoints share them."""
