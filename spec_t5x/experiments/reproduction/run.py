"""``spec-t5x reproduce``, from the items' names to the files of the report."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction import examples, provenance
from spec_t5x.experiments.reproduction.cache import Cache
from spec_t5x.experiments.reproduction.items import Item, Setting
from spec_t5x.experiments.reproduction.progress import Progress
from spec_t5x.experiments.reproduction.report import Report, assemble
from spec_t5x.experiments.reproduction.report_html import to_html
from spec_t5x.experiments.reproduction.report_json import to_json
from spec_t5x.experiments.reproduction.report_markdown import to_markdown
from spec_t5x.experiments.reproduction.runner import duration, make_plan, one_line, run
from spec_t5x.inference.signals import Stopped, stopping
from spec_t5x.machine.atomic import write_whole

CACHE = "cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is wanted, and where."""

    items: Sequence[Item]
    setting: Setting
    output: Path
    # Compute all again, whatever is kept.
    fresh: bool = False


def reproduce(request: Request, stream: io.TextIOBase) -> int:
    """Computes what is not kept yet and writes the report.

    Args:
      request: what is wanted.
      stream: is told what happens.

    Returns:
      0, or 1 if something could not be computed: the report says what and why. After a
      signal, 128 and its number: what was finished is kept.

    Raises:
      InputError: the output cannot be written, or the data is not there.
    """
    examples.check(request.setting)
    _check_writable(request.output)
    machine = provenance.describe_machine()
    origin = {
        "machine": machine,
        "versions": provenance.versions(),
        "commit": provenance.commit(),
    }
    # Our own version is not among them: what a part depends on of our code, it says itself.
    software = {name: v for name, v in origin["versions"].items() if name != "spec_t5x"}
    cache = Cache(request.output / CACHE, {**machine, "versions": software})
    cache.tidy()
    plan = make_plan(request.items, request.setting, cache, fresh=request.fresh)
    with Progress(plan.seconds, stream) as progress:
        for remark in plan.remarks:
            progress.say(remark)
        progress.say(plan.sentence())
        try:
            with stopping():
                outcome = run(plan, cache, progress, origin, provenance.now)
        except Stopped as signal:
            progress.say(
                f"stopped by {signal}: what was finished is kept in {cache.directory}, and the "
                "same command goes on from there"
            )
            return 128 + signal.number
        except OSError as error:
            raise InputError(_cannot_write(request.output, error)) from error
    try:
        report = assemble(plan, outcome, request.output, origin, provenance.now())
        _write(report, request.output)
    except OSError as error:
        raise InputError(_cannot_write(request.output, error)) from error
    return _tell(report, request.output, stream)


def listing(items: Sequence[Item], setting: Setting) -> str:
    """A line for each item, with what it takes where nothing is kept; parts may be shared."""
    width = max(len(item.name) for item in items)
    return "\n".join(
        f"{item.name:{width}}  {item.title} ({_estimate(item, setting)})" for item in items
    )


def _estimate(item: Item, setting: Setting) -> str:
    try:
        if reason := item.unavailable(setting):
            return f"not on this machine: {reason}"
        parts = item.parts(setting)
    except Exception as error:  # the other items are listed all the same
        return f"cannot be computed: {one_line(error)}"
    return f"about {duration(sum((part.seconds for part in parts), 0.0))}" if parts else "a moment"


def _check_writable(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(_cannot_write(output, error)) from error


def _cannot_write(output: Path, error: OSError) -> str:
    return (
        f"cannot write to --output {output} ({error.strerror or error}): give another, or see to "
        "its space and permissions"
    )


def _write(report: Report, output: Path) -> None:
    for name, make in (
        ("report.html", to_html),
        ("report.md", to_markdown),
        ("results.json", to_json),
    ):
        write_whole(output / name, [make(report).encode()])


def _tell(report: Report, output: Path, stream: io.TextIOBase) -> int:
    """Says where the report is and what it lacks; the exit status."""
    for entry in report.entries:
        if entry.state != "complete":
            reasons = entry.problems or (entry.unavailable,)
            print(f"spec-t5x: {entry.item.name} {entry.state}: {reasons[0]}", file=stream)
    print(f"spec-t5x: the report is {output / 'report.html'}", file=stream, flush=True)
    return 0 if report.complete else 1
