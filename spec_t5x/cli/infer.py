"""``spec-t5x infer``: many inputs, answered in a directory; run again to go on."""

import argparse
import ast
import dataclasses
import importlib.metadata
from typing import Any

from spec_t5x.cli import settings

HELP = "answer a file or a seqio task of inputs; run again to go on after an interruption"

# Where neither a flag nor a gin file says: a batch shares one reading of the weights.
_BATCH_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    _add_inputs(parser.add_argument_group("inputs"))
    outputs = parser.add_argument_group("outputs")
    outputs.add_argument("--output_dir", metavar="DIR", help="shards, and predictions.jsonl")
    outputs.add_argument(
        "--shard_size", type=int, metavar="N", help="inputs in a shard: a kill costs one (1024)"
    )
    switches = {
        "strict": "decode nothing if any input cannot be decoded",
        "overwrite": "delete an earlier run's answers in the directory and start anew",
    }
    for name, text in switches.items():
        outputs.add_argument(f"--{name}", action="store_true", default=None, help=text)
    outputs.add_argument(
        "--no_merge", dest="merge", action="store_false", default=None, help="leave it at shards"
    )
    _add_hosts(parser.add_argument_group("devices and hosts"))
    settings.add_arguments(parser)


def _add_inputs(group) -> None:
    group.add_argument(
        "--input", metavar="FILE", help="JSON lines, or a text on each line; gzipped or not"
    )
    group.add_argument(
        "--format", choices=("auto", "jsonl", "text"), help="of the file (by its name)"
    )
    group.add_argument(
        "--field", metavar="NAME", help="of a JSON line, with the text (inputs, input or text)"
    )
    group.add_argument("--mixture_or_task", metavar="NAME", help="seqio's name, instead of a file")
    group.add_argument("--split", metavar="NAME", help="of the task (validation)")
    group.add_argument(
        "--task_module",
        "--import",
        action="append",
        dest="task_modules",
        metavar="MODULE",
        help="imported first, for the tasks that it registers",
    )
    group.add_argument(
        "--task_feature_lengths",
        type=_lengths,
        metavar="{'inputs':N,'targets':N}",
        help="cut inputs to N tokens; end outputs after N",
    )


def _add_hosts(group) -> None:
    group.add_argument(
        "--model_parallel", type=int, metavar="N", help="devices that share one model (1)"
    )
    group.add_argument(
        "--multiprocess",
        action="store_true",
        help="one of several processes, which find each other (Cloud TPU, Slurm, Open MPI)",
    )
    group.add_argument("--coordinator_address", metavar="HOST:PORT", help="of process 0")
    group.add_argument("--process_count", type=int, metavar="N", help="processes of this run")
    group.add_argument("--process_index", type=int, metavar="N", help="which of them this is")


def run(args: argparse.Namespace) -> int:
    """Infers. Exit status 1 if an input could not be decoded, 128 + N after signal N."""
    import gin

    from spec_t5x.inference.processes import HostOptions, join

    names = [field.name for field in dataclasses.fields(HostOptions)]
    # Before anything asks JAX for a device, as reading the options does.
    hosts = join(HostOptions(**{name: getattr(args, name) for name in names}))

    # Before the gin files are parsed: it tells gin of its options.
    from spec_t5x.inference.infer_options import InferOptions

    models, decoding = settings.read(args)
    names = [field.name for field in dataclasses.fields(InferOptions)]
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    options = gin.get_configurable(InferOptions)(**given)
    options.check()
    asked = options.decoding(_with_batch_size(args, decoding))
    return _run(options, asked, models, models.draft_name(), hosts)


def _run(options, decoding, models, draft: str | None, hosts) -> int:
    from spec_t5x.inference.bulk import InterruptedRun, infer
    from spec_t5x.machine.compilation_cache import enable

    enable()

    def load(placement):
        from spec_t5x.generation import Generator

        return Generator.load(
            models.target,
            draft,
            models.draft_options(),
            vocabulary=models.vocabulary,
            shardings=placement.target if placement.mesh else None,
        )

    with hosts.together():
        source, of_models = _source(options, models), _settings(models, draft, options)
    try:
        report = infer(options, decoding, source, load, settings=of_models, hosts=hosts)
    except InterruptedRun as stopped:
        settings.say(f"stopped by {stopped} {stopped.message}")
        return 128 + stopped.number
    _say(report, hosts)
    return 1 if report.errors else 0


def _with_batch_size(args: argparse.Namespace, decoding):
    """The command's own default, where nobody gave a batch size."""
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

        return file_source(options.input, options.format, options.field)
    from spec_t5x.checkpoints.loading import open_model

    # Imported here: seqio brings TensorFlow along, seconds that a file does not need.
    from spec_t5x.inference.task_source import task_source

    return task_source(
        options.mixture_or_task,
        options.split,
        open_model(models.target, vocabulary=models.vocabulary).known_vocabulary(),
        lengths=options.task_feature_lengths,
        modules=options.modules,
    )


def _settings(models, draft: str | None, options) -> dict[str, Any]:
    """What of the models decides the answers, for the manifest."""
    from spec_t5x.inference.fingerprints import fingerprint

    values = dataclasses.asdict(models)
    values |= {"draft": draft, "dtype": models.draft_options().dtype}
    for name in ("target", "draft", "vocabulary"):
        if values.get(name) is not None:
            values[name] = fingerprint(values[name], options.output_dir)
    try:
        version = importlib.metadata.version("spec_t5x")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return values | {"spec_t5x": version}


def _say(report, hosts) -> None:
    """What was done, and what could not be."""
    say = settings.say
    for text in report.named:
        say(text)
    if report.errors > len(report.named) > 0:
        say(f"... and {report.errors - len(report.named)} more, each in its place in the output")
    what = f"process {hosts.index} answered" if hosts.index else "answered"
    where = f" in {report.merged}" if report.merged else ""
    rate = report.tokens / max(report.seconds, 1e-9)
    now = (
        f"{report.tokens} tokens in {report.seconds:.1f} s ({rate:.0f} tokens/s, "
        f"block efficiency {report.block_efficiency:.2f})"
    )
    now = now if report.tokens else "nothing was left to decode"
    say(f"{what} {report.inputs - report.errors} of {report.inputs} inputs{where}; {now}")
    if report.errors and not hosts.index:
        say(f"{report.errors} inputs have an error in place of an answer: mend them, run them anew")


def _lengths(text: str) -> dict:
    try:
        return dict(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like {{'inputs': 512}}") from error
