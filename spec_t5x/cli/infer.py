"""``spec-t5x infer``: bulk inference into a directory, which the same command resumes."""

import argparse
import dataclasses
import json
import logging
from typing import Any

import spec_t5x
from spec_t5x.cli import settings
from spec_t5x.errors import check_unused
from spec_t5x.inference.infer_options import HostOptions, InferOptions
from spec_t5x.inference.sources import file_source
from spec_t5x.machine.paths import expanded

log = logging.getLogger(__name__)

HELP = "decode the inputs of a file or a seqio task; the same command resumes an interrupted run"

_GROUPS = {
    "inputs": ("input", "field", "mixture_or_task", "split", "task_feature_lengths"),
    "cached tasks": settings.CACHES,
    "outputs": ("output_dir", "shard_size", "overwrite"),
    "independent workers, a command for each": ("shard_index", "shard_count", "merge"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags. A flag that is left out takes its value from gin."""
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        settings.add_flags(group, settings.flags_of(InferOptions, *names))
    # T5X calls this flag --import.
    parser.add_argument(
        "--task_module",
        "--import",
        action="append",
        dest="task_modules",
        metavar="MODULE",
        help="module that registers tasks, to be imported; repeatable",
    )
    flags = settings.flags_of(InferOptions, "model_parallel") | settings.flags_of(HostOptions)
    settings.add_flags(parser.add_argument_group("devices and hosts"), flags)
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the inference; returns 128 + N after signal N, 0 for a worker, else as ``_tell``."""
    from spec_t5x.inference.processes import join

    # Processes must join before JAX looks for devices, as it does when the options are read.
    joined = join(HostOptions(**settings.given(args, HostOptions)))

    from spec_t5x.generation import Generator
    from spec_t5x.inference.bulk import infer, merge
    from spec_t5x.inference.signals import Interrupted
    from spec_t5x.machine.compilation_cache import enable

    models, decoding, options = settings.read(args, InferOptions, batch_size=16)
    options = _of_process(options, joined)
    options.check()
    if options.input is not None:
        settings.check_no_task(args, options)
    if options.merge:
        return _tell(merge(expanded(options.output_dir)), "merged")
    decoding = options.decoding(decoding)
    enable()

    # Opened before a download of the models; a task needs their vocabulary.
    source = None if options.input is None else file_source(options.input, options.field)

    def load(placement):
        shardings = placement.params if placement.mesh else None
        return Generator.load_named(models, target, shardings=shardings)

    # Before anything is written: what other workers read must be a run that can start.
    target, opened = Generator.open(models, [models.draft_name()], decoding)
    source, of_models = source or _task(options, opened.vocabulary), _settings(models, options)
    try:
        report = infer(options, decoding, source, load, settings=of_models)
    except Interrupted as interrupted:
        log.error(f"stopped by {interrupted} {interrupted.how_far}")
        return 128 + interrupted.number
    is_part = options.shard_count is not None and report.merged is None
    status = _tell(report, f"worker {options.shard_index} answered" if is_part else "answered")
    # A scheduler would start a worker again that returns another status.
    return 0 if options.shard_count is not None else status


def _of_process(options: InferOptions, joined: tuple[int, int] | None) -> InferOptions:
    """Returns the options of the worker that this process is; ``joined`` are index and number."""
    if joined is None:
        return options
    check_unused(options, f"the {joined[1]} processes set it", "shard_index", "shard_count")
    return dataclasses.replace(options, shard_index=joined[0], shard_count=joined[1])


def _task(options, vocabulary):
    # Imported only for a task, because seqio imports TensorFlow, which takes seconds.
    import seqio

    from spec_t5x.data.task_examples import task_or_mixture
    from spec_t5x.inference.task_source import TaskSource

    task = task_or_mixture(
        options.mixture_or_task, vocabulary, modules=options.modules, caches=options.caches
    )
    return TaskSource(
        tasks=list(seqio.get_subtasks(task)),
        split=options.split,
        lengths=options.task_feature_lengths,
        vocabulary=vocabulary,
        cached=options.caches is not None,
    )


def _settings(models, options) -> dict[str, Any]:
    """Returns the models, with digests of their files, and the release, for the manifest."""
    from spec_t5x.checkpoints.digests import files_digest

    values = dataclasses.asdict(models)
    values |= {"draft": models.draft_name(), "dtype": models.draft_options().dtype}
    for name in ("target", "draft", "vocabulary"):
        if values.get(name) is not None:
            values[name] = files_digest(values[name], options.output_dir)
    return values | {"spec_t5x": spec_t5x.__version__}


def _tell(report, who: str) -> int:
    """Logs errors and a summary, prints the report as JSON; returns 1 if an input failed."""
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
        left = f"shards left: {report.shards_left}"
        log.info(f"{left}; the worker that finishes last joins all shards")
    if report.verdict and report.merged:
        log.info(report.verdict)
    if report.errors and report.merged:
        log.error(
            f"inputs with an error in place of an answer: {report.errors}; give them, corrected, "
            "to another --output_dir"
        )
    figures = dataclasses.asdict(report) | {"tokens_per_second": rate}
    figures["merged"] = report.merged and str(report.merged)
    del figures["named"]
    print(json.dumps(figures))
    return 1 if report.errors else 0
