"""Words that options take for a choice, in flags, gin and Python. Imports nothing."""

# Of gamma: as many drafts as pay (``loops/pace.py``).
AUTO = "auto"
# Of the draft's name: plain decoding.
NO_DRAFT = "none"
# Kinds of drafts and verifiers.
DRAFTS = (
    *("transformer", "unigram", "bigram", "ngram", "copy", "uniform", "medusa", "eagle"),
    *("early_exit", "int8", "int4", "mixed", "cascade"),
)
VERIFIERS = ("token", "block", "coupled", "rejection", "multi", "tree")
# Of weights: matrices in 8 bits with a scale for each column, or in 4 for 64 rows of it.
INT8 = "int8"
INT4 = "int4"
WEIGHTS = (AUTO, INT8, INT4)
# What weights are written to disk as.
STORED_DTYPES = ("bfloat16", "float32")
