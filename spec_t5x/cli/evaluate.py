"""``spec-t5x evaluate``: quality and acceptance over a file of text pairs or a seqio task."""

import argparse
import dataclasses
import json

from spec_t5x.cli import settings

HELP = "BLEU or ROUGE, and acceptance, over a file of text pairs or a seqio task"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    texts = parser.add_argument_group("texts")
    texts.add_argument("--data", metavar="FILE", help=".tsv or .jsonl, gzipped or not")
    numbers = {
        "source_column": "of a .tsv, from 0 (of two columns the first, of more the second)",
        "target_column": "of a .tsv, from 0 (the one after it)",
        "num_columns": "of each line of a .tsv (as of the first line)",
        "limit": "take the first N pairs only",
        "source_words": "of a file: take the first N words of each source only",
    }
    for name, text in numbers.items():
        texts.add_argument(f"--{name}", type=int, metavar="N", help=text)
    names = {
        "source_field": "of a .jsonl (article)",
        "target_field": "of a .jsonl (highlights)",
        "prefix": "put before every source of a file",
        "metric": "of a file: bleu, bleu_intl (BLEU as T5 reports it) or rouge (bleu)",
        "mixture_or_task": "seqio's name, instead of a file: its texts and its own metrics",
        "split": "of the task (validation)",
    }
    for name, text in names.items():
        texts.add_argument(f"--{name}", metavar="TEXT" if name == "prefix" else "NAME", help=text)
    texts.add_argument(
        "--task_module",
        action="append",
        dest="task_modules",
        metavar="MODULE",
        help="imported first, for the tasks that it registers",
    )
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints a JSON object, for a mixture one for each of its tasks."""
    import gin

    # First: it tells gin of its options.
    from spec_t5x.experiments.evaluation import EvaluationOptions, evaluate, read_sets

    models, options = settings.read(args)
    draft = models.draft_name()
    names = [field.name for field in dataclasses.fields(EvaluationOptions)]
    given = {n: getattr(args, n, None) for n in names if getattr(args, n, None) is not None}
    if "task_modules" in given:
        given["task_modules"] = tuple(given["task_modules"])
    evaluated = gin.get_configurable(EvaluationOptions)(**given)
    options = evaluated.decoding(options)

    from rich.console import Console
    from rich.progress import Progress

    from spec_t5x.generation import Generator
    from spec_t5x.machine.compilation_cache import enable

    enable()
    generator = Generator.load(
        models.target, draft, models.draft_options(), vocabulary=models.vocabulary
    )
    sets = read_sets(evaluated, generator.vocabulary)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        for texts in sets:
            shown = bar.add_task(f"evaluating {texts.name}", total=len(texts.pairs))
            evaluation = evaluate(
                generator,
                texts.pairs,
                options,
                lambda done, total, shown=shown: bar.update(shown, completed=done, total=total),
                metric=texts.metric,
                intervals=texts.intervals,
            )
            task = {} if evaluated.data else {"task": texts.name, "split": evaluated.split}
            print(json.dumps(task | evaluation.to_dict(), indent=2))
    return 0
