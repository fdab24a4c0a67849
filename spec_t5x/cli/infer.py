"""``spec-t5x infer``: outputs for many inputs, in a directory; the same command resumes."""

import argparse
import ast
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import spec_t5x
from spec_t5x.cli import settings
from spec_t5x.errors import InputError

log = logging.getLogger(__name__)

HELP = "decode a file or a seqio task of inputs; the same command resumes an interrupted run"

# Where neither a flag nor gin gives one.
_BATCH_SIZE = 16


_INPUTS = {
    "input": ("FILE", "JSON lines (.jsonl, .json), or a text on each line; gzipped or not"),
    "field": ("NAME", "of a JSON line, with the text (inputs, input or text)"),
    "mixture_or_task": ("NAME", "seqio's name, instead of a file"),
    "split": ("NAME", "of the task (validation)"),
    **settings.CACHES,
}
_OUTPUTS = {
    "output_dir": ("DIR", "shards, and predictions.jsonl"),
    "shard_size": (int, "inputs in a shard: a kill costs at most one shard (1024)"),
    "overwrite": (bool, "delete an earlier run's outputs in the directory and start again"),
}
_WORKERS = {
    "shard_index": (int, "of this worker: it answers every shard_count-th shard from there on"),
    "shard_count": (int, "workers that need not know of one another; the last joins the shards"),
    "merge": (bool, "nothing but join the shards in output_dir"),
}
_HOSTS = {
    "model_parallel": (int, "devices that share one model (1)"),
    "multiprocess": (
        bool,
        "one of several processes, which find each other (Cloud TPU, Slurm, Open MPI)",
    ),
    "coordinator_address": ("HOST:PORT", "of process 0"),
    "process_count": (int, "processes of this run"),
    "process_index": (int, "which of them this is"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    inputs = parser.add_argument_group("inputs")
    settings.add_flags(inputs, _INPUTS)
    # T5X's name for it is --import.
    inputs.add_argument(
        "--task_module",
        "--import",
        action="append",
        dest="task_modules",
        metavar="MODULE",
        help="imported first, for the tasks that it registers",
    )
    inputs.add_argument(
        "--task_feature_lengths",
        type=_lengths,
        metavar="{'inputs':N,'targets':N}",
        help="cut inputs to N tokens; end outputs after N",
    )
    settings.add_flags(parser.add_argument_group("outputs"), _OUTPUTS)
    settings.add_flags(parser.add_argument_group("workers of any scheduler"), _WORKERS)
    settings.add_flags(parser.add_argument_group("devices and hosts"), _HOSTS)
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Infers. Exit status 128 + N after signal N; else ``_tell``'s."""
    from spec_t5x.inference.processes import HostOptions, join

    # Processes must join before anything asks JAX for a device, as reading the options does.
    hosts = join(HostOptions(**settings.given(args, HostOptions)))

    from spec_t5x.generation import Generator
    from spec_t5x.inference.bulk import infer, merge
    from spec_t5x.inference.infer_options import InferOptions
    from spec_t5x.inference.signals import Interrupted
    from spec_t5x.machine.compilation_cache import enable

    models, decoding, options = settings.read(args, InferOptions)
    options.check()
    if options.merge:
        return _tell(merge(Path(options.output_dir).expanduser()), "merged")
    if options.shard_count is not None and hosts.count > 1:
        raise InputError(
            f"shard_count is {options.shard_count} and {hosts.count} processes have met: give one "
            "or the other"
        )
    decoding = options.decoding(_with_batch_size(args, decoding))
    enable()

    def load(placement):
        shardings = placement.target if placement.mesh else None
        return Generator.load_named(models, shardings=shardings)

    with hosts.together():
        of_models, source = _settings(models, options), _source(options, models)
    try:
        report = infer(options, decoding, source, load, settings=of_models, hosts=hosts)
    except Interrupted as interrupted:
        log.error(f"stopped by {interrupted} {interrupted.how_far}")
        return 128 + interrupted.number
    who = f"process {hosts.index} answered" if hosts.index else "answered"
    if report.merged is None and options.shard_count is not None:
        who = f"worker {options.shard_index} answered"
    status = _tell(report, who)
    # A scheduler takes another status for work to be done again. Of several processes the one that
    # has joined the shards speaks for all.
    return 0 if options.shard_count is not None or report.merged is None else status


def _with_batch_size(args: argparse.Namespace, decoding):
    """The command's own default, where neither a flag nor gin gives a batch size."""
    import gin

    if args.batch_size is not None:
        return decoding
    try:
        gin.query_parameter("GenerateOptions.batch_size")
    except ValueError:
        return dataclasses.replace(decoding, batch_size=_BATCH_SIZE)
    return decoding


def _source(options, models):
    if options.input is not None:
        from spec_t5x.inference.sources import file_source

        return file_source(options.input, options.field)
    from spec_t5x.checkpoints.loading import open_model

    # Imported here: seqio brings TensorFlow along, seconds that a file does not need.
    from spec_t5x.inference.task_source import task_source

    return task_source(
        options.mixture_or_task,
        options.split,
        open_model(models.target, vocabulary=models.vocabulary).known_vocabulary(),
        lengths=options.task_feature_lengths,
        modules=options.modules,
        caches=options.caches,
    )


def _settings(models, options) -> dict[str, Any]:
    """What the outputs depend on besides inputs and options, for the manifest."""
    from spec_t5x.checkpoints.digests import files_digest

    values = dataclasses.asdict(models)
    values |= {"draft": models.draft_name(), "dtype": models.draft_options().dtype}
    for name in ("target", "draft", "vocabulary"):
        if values.get(name) is not None:
            values[name] = files_digest(values[name], options.output_dir)
    return values | {"spec_t5x": spec_t5x.__version__}


def _tell(report, who: str) -> int:
    """Says what is wrong and what was done, prints the figures, and returns the exit status.

    It is 1 if an input could not be decoded.
    """
    for text in report.named:
        log.error(text)
    if report.errors > len(report.named) > 0:
        more = report.errors - len(report.named)
        log.error(f"... and {more} more, each at its place in the output")
    where = f" in {report.merged}" if report.merged else ""
    rate = report.tokens / max(report.seconds, 1e-9)
    decoded = "nothing was left to decode"
    if report.tokens:
        decoded = (
            f"{report.tokens} tokens in {report.seconds:.1f} s ({rate:.0f} tokens/s, "
            f"block efficiency {report.block_efficiency:.2f}, occupancy {report.occupancy:.0%})"
        )
    log.info(f"{who} {report.inputs - report.errors} of {report.inputs} inputs{where}; {decoded}")
    if report.shards_left:
        left = report.shards_left
        log.info(f"{left} shards are left: the last of their workers joins all of them")
    if report.verdict and report.merged:
        log.info(report.verdict)
    if report.errors and report.merged:
        log.error(
            f"{report.errors} inputs have an error in place of an answer: fix them and run again"
        )
    figures = dataclasses.asdict(report) | {"tokens_per_second": rate}
    figures["merged"] = report.merged and str(report.merged)
    print(json.dumps({name: value for name, value in figures.items() if name != "named"}))
    return 1 if report.errors else 0


def _lengths(text: str) -> dict:
    try:
        return dict(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like {{'inputs': 512}}") from error
