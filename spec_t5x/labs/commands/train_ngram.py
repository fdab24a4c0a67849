"""``spec-t5x train-ngram``: a draft from counts of n-grams."""

import argparse
import json
import logging
import sys

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.machine.paths import expanded
from spec_t5x.machine.progress import doing

log = logging.getLogger(__name__)

HELP = "make a draft of the n-grams in a text, for targets with the same vocabulary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="FILE",
        help="texts, one on each line, or .tsv; gzipped or not",
    )
    parser.add_argument(
        "--vocabulary",
        required=True,
        metavar="MODEL",
        help="the target's vocabulary: the target's directory or name, a SentencePiece file "
        "(FILE:100 adds 100 extra ids), or a tokenizer.json",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to write")
    numbers = {
        "column": (0, "column of the texts, from 0"),
        "num_columns": (1, "number of tab-separated columns in each line"),
        "order": (3, "length of the longest n-grams in tokens"),
        "min_count": (2, "minimum count of the n-grams that are kept"),
        "max_successors": (64, "maximum number of next tokens kept for a context"),
    }
    for name, (default, text) in numbers.items():
        text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace existing n-grams")


def run(args: argparse.Namespace) -> int:
    """Counts n-grams, writes the draft, and prints a JSON object with its sizes; returns 0."""
    check_at_least(args, order=1, min_count=1, max_successors=1)
    from spec_t5x.checkpoints.loading import named_vocabulary
    from spec_t5x.checkpoints.storage.files import check_destination
    from spec_t5x.labs.text_pairs import read_lines
    from spec_t5x.labs.training.batching import tokenise
    from spec_t5x.labs.training.exports import save_ngram
    from spec_t5x.labs.training.ngram_counts import count_ngrams, join_texts

    output = expanded(args.output)
    check_destination(output, args.overwrite)
    vocabulary = named_vocabulary(args.vocabulary)
    with doing(log, f"reading {', '.join(args.data)}"):
        texts = list(read_lines(args.data, (args.column,), args.num_columns))
    if not texts:
        raise InputError(
            f"column {args.column} of {', '.join(args.data)} holds no text: give the column of the "
            "texts"
        )
    with doing(log, f"tokenizing {len(texts):,} texts"):
        tokenised = tokenise(((None, text) for text in texts), vocabulary, (0, sys.maxsize))
        corpus = join_texts(tokenised.target.split())
    limits = {"min_count": args.min_count, "max_successors": args.max_successors}
    with doing(log, f"counting n-grams of {corpus.num_predicted:,} tokens"):
        draft = count_ngrams(corpus, vocabulary.vocab_size, order=args.order, **limits)
    report = {
        "counted": {"texts": corpus.num_texts, "tokens": corpus.num_predicted, **limits},
        "contexts": [len(level.tokens) for level in draft.levels],
        "entries": [len(level.masses) for level in draft.levels],
    }
    save_ngram(output, draft, vocabulary, extra=report, overwrite=args.overwrite)
    print(json.dumps({"output": str(output), "order": draft.order, **report}, indent=2))
    return 0
