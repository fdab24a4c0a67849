"""Decoder-only language models: GPT, GPT-2 checkpoints, WordPiece vocabularies, training."""

from spec_t5x.registry import register

register("family", gpt="spec_t5x.contrib.lm.gpt:FAMILY")
register("format", gpt2="spec_t5x.contrib.lm.gpt2:FORMAT")
register("tokenizer", wordpiece="spec_t5x.contrib.lm.wordpiece:WordPieceVocabulary")
register("training data", TextOptions="spec_t5x.contrib.lm.training_data:TextOptions")
# The same function as spec-t5x train: the gin file binds the GPT's configuration and text data.
register("training", **{"train-lm": "spec_t5x.labs.training.run_train:train"})
