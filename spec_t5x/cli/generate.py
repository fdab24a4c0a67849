"""``spec-t5x generate``: text in, the target's text out, faster."""

import argparse
import dataclasses
import io
import itertools
import json
import logging
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spec_t5x.cli import settings
from spec_t5x.data.text_files import arriving, is_jsonl, json_line, stream_lines
from spec_t5x.errors import InputError, check_unused
from spec_t5x.inference.sources import FileSource, Item, file_source, no_inputs
from spec_t5x.machine.extras import HAS_LABS
from spec_t5x.machine.paths import expanded
from spec_t5x.machine.progress import doing
from spec_t5x.names import NO_DRAFT

log = logging.getLogger(__name__)

HELP = "generate text with a target model, sped up by a draft"

_INPUTS = {
    "input": ("FILE", "a text per line, or JSON lines; gzipped or not (default: standard input)"),
    "field": ("NAME", "field of JSON lines that holds the text (default: inputs, input or text)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags. A flag that is left out takes its value from gin."""
    settings.add_text(parser)
    settings.add_flags(parser, _INPUTS)
    shown = parser.add_argument_group("output").add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one JSON object for each output")
    text = "print a line for each iteration, coloured as in the paper's Figure 1"
    shown.add_argument("--trace", action="store_true", help=text)
    text = "also decode without the draft; print rates, speed-up and whether the texts are equal"
    parser.add_argument("--compare", action="store_true", help=text)
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Decodes the inputs and prints the outputs; returns 2 if an input had no output, else 0."""
    from spec_t5x.machine.compilation_cache import enable

    models, options = settings.read(args)
    _check_flags(args, options, models.draft_name())
    source = _source(args)
    enable()

    from spec_t5x.generation import Generator

    texts = [] if args.text == ["-"] else args.text
    target, _ = Generator.open(models, [models.draft_name()], options, *texts)
    generator = Generator.load_named(models, target)
    del target  # It may hold all weights of an old file.
    command = _Command(args, generator, options)
    command.run(source)
    return 2 if command.failed else 0


def _check_flags(args, options, draft: str | None) -> None:
    if args.text and args.input:
        raise InputError(f"both TEXT and --input {args.input} were given: give one of them")
    if not args.target and (found := [t for t in args.text if os.path.isfile(f"{t}/config.json")]):
        raise InputError(f"the text {found[0]!r} is a model's directory: give it as --target")
    if args.field and args.text not in ([], ["-"]):
        raise InputError(f"--field is {args.field}, which only JSON lines have: leave it out")
    if args.trace and args.compare:
        raise InputError("both --trace and --compare were given: give one of them")
    if not (args.trace or args.compare):
        return
    flag = "--trace" if args.trace else "--compare"
    if not HAS_LABS:
        raise InputError(f"{flag} {settings.NO_LABS}")
    if draft is None:
        raise InputError(f"{flag} needs a draft and --draft is {NO_DRAFT}: give one")
    check_unused(options, f"{flag} has no beam search", "beams")
    if options.gamma == 0:
        raise InputError(f"gamma is 0, which drafts nothing: {flag} needs at least 1")
    if args.trace and options.num_decodes > 1:
        raise InputError(f"num_decodes is {options.num_decodes}: --trace needs 1")


# --- input -------------------------------------------------------------------


def _source(args: argparse.Namespace) -> Iterator[Iterable[Item]]:
    """Returns groups of inputs: the lines that arrived together on a stream, or all inputs."""
    if args.text and args.text != ["-"]:
        items = enumerate(args.text)
        return iter([[Item(index=n, place=("line", n + 1), text=text) for n, text in items]])
    is_pipe = args.input is not None and expanded(args.input).is_fifo()
    if args.input in (None, "-") or is_pipe:
        if not is_pipe and sys.stdin.isatty():
            log.info("enter a text per line; Ctrl-D ends")
        name = str(expanded(args.input)) if is_pipe else "standard input"
        jsonl = args.field is not None or is_jsonl(name)
        read = FileSource(path=Path(name), jsonl=jsonl, field=args.field)
        stream = open(name, "rb") if is_pipe else _standard_input()  # noqa: SIM115
        return _lines(read, arriving(stream_lines(stream, name)))
    read = file_source(args.input, field=args.field)
    if next(read.raw(), None) is None:
        # Raised here, before anything is loaded.
        raise no_inputs(read.name)
    # One group, whose lines are read while others are decoded.
    return _lines(read, iter([read.raw()]))


def _standard_input() -> io.BufferedIOBase:
    """Returns the bytes of standard input; Python need not wait for a thread that reads them."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except OSError:
        return sys.stdin.buffer


def _lines(read, parts: Iterable[Iterable[bytes]]) -> Iterator[Iterable[Item]]:
    """Converts groups of lines to groups of inputs; raises ``InputError`` if there is no line."""
    numbers = itertools.count()
    failure = None

    def line(raw: bytes) -> Item:
        item = read.item(next(numbers), raw)
        # The model decides whether a text may be empty.
        return item if raw.strip() else dataclasses.replace(item, error=None)

    def lines(part: Iterable[bytes]) -> Iterator[Item]:
        nonlocal failure
        try:
            yield from map(line, part)
        except InputError as error:
            # Raised after this group: here it would stop the decoding of the lines before it.
            failure = error

    for part in parts:
        yield lines(part)
        if failure is not None:
            raise failure
    if next(numbers) == 0:
        raise no_inputs(read.name)


# --- output ------------------------------------------------------------------


@dataclasses.dataclass
class _Command:
    """Printer of outputs, which decodes the inputs in the way that the flags in ``args`` choose."""

    args: argparse.Namespace
    generator: Any
    options: Any
    # True once an input could not be decoded.
    failed: bool = False

    def run(self, source: Iterator[Iterable[Item]]) -> None:
        """Decodes all inputs: compared, traced, streamed to a terminal, or in batches."""
        args, options = self.args, self.options
        single = options.batch_size == options.num_decodes == 1 and not options.beams
        streams = sys.stdout.isatty() and not args.json and single
        if not (args.compare or args.trace or streams):
            self._generate(source)
            return
        lines = map(self.checked, itertools.chain.from_iterable(source))
        if args.compare:
            self._compare(list(lines))
        else:
            self._show(lines)

    def _generate(self, source: Iterator[Iterable[Item]]) -> None:
        place = 0
        for part in source:
            # Duplicated, because the generator reads inputs ahead of its answers.
            lines, ahead = itertools.tee(part)
            texts = (InputError(one.error) if one.error else one.text for one in ahead)
            answers = self.generator.generate(texts, self.options, first=place)
            for line, answer in zip(lines, answers, strict=True):
                if answer.error is not None:
                    line = self._refused(line, answer.error)
                self._print(line, answer)
                place += 1
        self._log_verdict(place)

    def _log_verdict(self, number: int) -> None:
        verdict = self.generator.verdict(self.options)
        # One text may end before drafting pays.
        if verdict and (number > 1 or self.options.beams):
            log.info(verdict)

    def _show(self, lines: Iterator[Item]) -> None:
        """Prints each output while it is decoded, as text or as a trace."""
        show = _of_labs("console:print_trace") if self.args.trace else _print_stream
        for number, line in enumerate(lines, start=1):  # noqa: B007, the last is reported
            if line.error is None:
                try:
                    show(self.generator, line.text, self.options, place=line.index)
                except InputError as error:
                    line = self._refused(line, error)
            if line.error is not None and not self.args.trace:
                print(flush=True)
        if not self.args.trace:
            self._log_verdict(number)

    def _compare(self, lines: list[Item]) -> None:
        texts = [line.text for line in lines if line.error is None]
        if not texts:
            raise InputError("all inputs have errors: give at least one that can be decoded")
        with doing(log, "decoding in turn, plainly and speculatively, and timing both"):
            comparison = _of_labs("comparison:compare")(self.generator, texts, self.options)
        outputs = iter(comparison.outputs)
        for line in lines:
            self._print(line, next(outputs) if line.error is None else ())
        if self.args.json:
            print(json.dumps({"comparison": comparison.to_dict()}))
        else:
            _of_labs("console:print_comparison")(comparison)

    def checked(self, line: Item) -> Item:
        """Returns the line; sets and logs its error if it cannot be decoded."""
        text = InputError(line.error) if line.error else line.text
        try:
            self.generator.tokenize(text, self.options)
        except InputError as error:
            return self._refused(line, error)
        return line

    def _refused(self, line: Item, error: InputError) -> Item:
        """Logs why an input has no output; returns the line with this error."""
        self.failed = True
        log.error(f"line {line.index + 1}: {error}")
        return dataclasses.replace(line, error=str(error))

    def _print(self, line: Item, outputs: Iterable[Any]) -> None:
        """Prints each output as a line or JSON; an error as empty lines or as JSON."""
        if line.error is not None:
            values = {"line": line.index + 1, "input": line.text, "error": line.error}
            empty = "\n" * (self.options.num_decodes - 1)
            print(json_line(values) if self.args.json else empty, flush=True)
            return
        for output in outputs:
            values = dataclasses.asdict(output)
            print(json_line(values) if self.args.json else _one_line(output.output), flush=True)


def _of_labs(place: str) -> Any:
    return pkgutil.resolve_name(f"spec_t5x.labs.benchmark.{place}")


def _print_stream(generator, source: str, options, place: int) -> None:
    shown = ""
    for event in generator.stream(source, options, place=place):
        text = _one_line(event.text)
        if text.startswith(shown):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
