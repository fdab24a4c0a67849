"""Language models, as the paper's: GPT, checkpoints of GPT-2, word pieces, training on lines."""

from spec_t5x.registry import register

register("family", gpt="spec_t5x.contrib.lm.gpt:FAMILY")
register("format", gpt2="spec_t5x.contrib.lm.gpt2:FORMAT")
register("tokenizer", wordpiece="spec_t5x.contrib.lm.wordpiece:WordPieceVocabulary")
register("training data", TextOptions="spec_t5x.contrib.lm.training_data:TextOptions")
# ``train`` under the name of what its gin file binds.
register("training", **{"train-lm": "spec_t5x.labs.training.run_train:train"})
