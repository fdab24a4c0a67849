"""``spec-t5x generate``: the main job. Text in, the target's text out, faster."""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spec_t5x.cli import settings
from spec_t5x.errors import InputError

HELP = "generate text with a target, sped up by a draft"

# Lines of standard input that are read before they are asked for, and seconds in which lines
# that were written together arrive.
_READ_AHEAD = 4096
_TOGETHER = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="an input; more are more inputs")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="one input a line, or JSON lines, gzipped or not; - is standard input",
    )
    parser.add_argument("--field", metavar="NAME", help="of JSON lines (inputs, input or text)")
    shown = parser.add_argument_group("output").add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="one JSON object for each input")
    shown.add_argument(
        "--trace", action="store_true", help="a line for each iteration, coloured as in Figure 1"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also decode plainly; print both rates, the speed-up and whether the texts are equal",
    )
    settings.add_arguments(parser)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One input: its text, and why it cannot be read if it cannot."""

    number: int
    text: str
    error: str | None = None


def run(args: argparse.Namespace) -> int:
    """Generates; exit status 2 if any input was bad."""
    from spec_t5x.machine.compilation_cache import announce, enable

    models, options = settings.read(args)
    draft = models.draft_name()
    _check_flags(args, options, draft)
    source = _source(args)
    enable()
    announce(settings.say)

    from spec_t5x.generation import Generator

    generator = Generator.load(
        models.target, draft, models.draft_options(), vocabulary=models.vocabulary
    )
    command = _Command(args, generator, options)
    if args.compare or args.trace:
        lines = [command.checked(line) for lines in source for line in lines]
        _compare(args, generator, lines, options) if args.compare else _trace(
            generator, lines, options
        )
    elif _streams(args, generator, options):
        _stream(command, source)
    else:
        _generate(command, source)
    return 2 if command.failed else 0


@dataclasses.dataclass
class _Command:
    """What all ways of showing texts share."""

    args: argparse.Namespace
    generator: Any
    options: Any
    # Whether an input had no output.
    failed: bool = False

    def checked(self, line: Line) -> Line:
        """The line, with what keeps it from being decoded; which is said, if anything does.

        Raises:
          InputError: something does, and the input came as an argument.
        """
        if line.error is None:
            try:
                self.generator.tokenize(line.text, self.options)
            except InputError as error:
                line = dataclasses.replace(line, error=str(error))
        if line.error is not None:
            if self.args.text:
                raise InputError(line.error)
            self.refuse(line)
        return line

    def refuse(self, line: Line) -> None:
        """Says why an input has no output."""
        self.failed = True
        settings.say(f"line {line.number}: {line.error}")


def _check_flags(args, options, draft: str | None) -> None:
    if args.field and not args.input:
        raise InputError(
            f"--field is {args.field} and there is no --input: give a file, or leave it"
        )
    if args.text and args.input:
        raise InputError(f"both TEXT and --input {args.input} were given: give one of them")
    if draft is None and (args.trace or args.compare):
        flag = "--trace" if args.trace else "--compare"
        raise InputError(f"{flag} needs a draft and --draft is {settings.NO_DRAFT}: give one")
    if args.trace and args.compare:
        raise InputError("both --trace and --compare were given: give one of them")
    if options.beams and (args.trace or args.compare):
        flag = "--trace" if args.trace else "--compare"
        raise InputError(f"beams is {options.beams}: {flag} shows no beam search")
    if args.trace and options.num_decodes > 1:
        raise InputError(f"num_decodes is {options.num_decodes}: --trace shows 1")


def _source(args: argparse.Namespace) -> Iterator[list[Line]]:
    """The inputs, in parts that are there together.

    Raises:
      InputError: there is none, or a file cannot be read.
    """
    if args.text:
        return iter([[Line(number=n, text=text) for n, text in enumerate(args.text, 1)]])
    if args.input is None and sys.stdin.isatty():
        raise InputError("no input: give TEXT, --input FILE, or pipe lines in")
    from spec_t5x.inference.sources import FileSource, file_source

    if args.input in (None, "-"):
        read = FileSource(path=Path("-"), jsonl=args.field is not None, field=args.field)
        return _parts(read, _as_they_come(sys.stdin.buffer))
    read = file_source(args.input, field=args.field)
    # One part, read as it is decoded.
    return _parts(read, iter([read.raw()]))


def _parts(read, parts: Iterable[Iterable[bytes]]) -> Iterator[Iterable[Line]]:
    """Lines of bytes, with what is wrong with them."""
    numbers = itertools.count()

    def line(raw: bytes) -> Line:
        item = read.item(next(numbers), raw)
        # Whether a text may be empty is for the model to say.
        error = item.error if raw.strip() else None
        return Line(number=item.place[1], text=item.text, error=error)

    for part in parts:
        yield map(line, part)


def _as_they_come(stream) -> Iterator[list[bytes]]:
    """The lines of a stream: those that are there, then those that came meanwhile."""
    waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=_READ_AHEAD)

    def read() -> None:
        for line in stream:
            waiting.put(line)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    line = waiting.get()
    while line is not None:
        # What is written at once need not arrive at once.
        time.sleep(_TOGETHER)
        part = [line]
        while (line := _next_of(waiting)) not in (None, b""):
            part.append(line)
        yield part
        if line == b"":
            line = waiting.get()


def _next_of(waiting: queue.Queue) -> bytes | None:
    """The next line, None at the end of all, empty bytes if it has not come yet."""
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return b""


def _generate(command: "_Command", source: Iterator[Iterable[Line]]) -> None:
    """One line (or JSON object) for each output; an empty one for a bad input."""
    place, bar = 0, _bar(command.args)
    with bar:
        for part in source:
            if command.args.text:
                # One that cannot be decoded is a mistake: before any is.
                part = [command.checked(line) for line in part]
            # The generator looks ahead: what it was given waits here for its answer.
            asked: collections.deque[Line] = collections.deque()
            answers = command.generator.generate(_good(part, asked), command.options, first=place)
            for answer in answers:
                _refuse_first(command, asked)
                _print_answer(command, asked.popleft(), answer)
                bar.count(answer)
                place += 1
            _refuse_first(command, asked)
    verdict = command.generator.run(command.options).verdict
    if verdict and place > 1:
        settings.say(verdict)


def _good(lines: Iterable[Line], asked: "collections.deque[Line]") -> Iterator[str]:
    """The texts that can be decoded; all lines go to ``asked``."""
    for line in lines:
        asked.append(line)
        if line.error is None:
            yield line.text


def _refuse_first(command: "_Command", asked: "collections.deque[Line]") -> None:
    """Those before the next that has an answer."""
    while asked and asked[0].error is not None:
        line = asked.popleft()
        command.refuse(line)
        print(_json_error(line) if command.args.json else "", flush=True)


def _print_answer(command: "_Command", line: Line, answer) -> None:
    if answer.error is not None:
        refused = dataclasses.replace(line, error=str(answer.error))
        _refuse_first(command, collections.deque([refused]))
    for generation in answer:
        print(_json(generation) if command.args.json else _one_line(generation.output), flush=True)


def _streams(args, generator, options) -> bool:
    return (
        sys.stdout.isatty()
        and not args.json
        and generator.draft is not None
        and options.num_decodes == 1
        and not options.beams
    )


def _stream(command: "_Command", source: Iterator[Iterable[Line]]) -> None:
    """As ``_generate``, each text as it is accepted."""
    place = 0
    for line in itertools.chain.from_iterable(source):
        line = command.checked(line)
        if line.error:
            print(flush=True)
            continue
        try:
            _stream_one(command.generator, line.text, command.options, place)
        except InputError as error:
            print(flush=True)
            command.refuse(dataclasses.replace(line, error=str(error)))
        place += 1


def _stream_one(generator, source: str, options, place: int) -> None:
    ids, shown = [], ""
    for iteration in generator.steps(source, options, place):
        ids.extend(iteration.appended[0, : iteration.num_appended[0]].tolist())
        # A character whose bytes are still to come may yet change.
        text = _one_line(generator.vocabulary.decode(ids)).rstrip("\N{REPLACEMENT CHARACTER}")
        if text.startswith(shown):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(_one_line(generator.vocabulary.decode(ids))[len(shown) :], flush=True)


def _trace(generator, lines: list[Line], options) -> None:
    from spec_t5x.cli.trace import print_trace

    for place, text in enumerate(line.text for line in lines if not line.error):
        print_trace(generator, text, options, place=place)


def _compare(args, generator, lines: list[Line], options) -> None:
    from spec_t5x.experiments.comparison import compare

    texts = [line.text for line in lines if not line.error]
    if not texts:
        raise InputError("no input is left to compare on: give at least one good line")
    comparison = compare(generator, texts, options)
    outputs = iter(comparison.outputs)
    for line in lines:
        if line.error:
            print(_json_error(line) if args.json else "")
            continue
        for generation in next(outputs):
            print(_json(generation) if args.json else _one_line(generation.output))
    if args.json:
        print(json.dumps({"comparison": comparison.to_dict()}, ensure_ascii=False))
    else:
        from spec_t5x.cli.trace import print_comparison

        print_comparison(comparison)


class _NoBar(contextlib.nullcontext):
    def count(self, answer) -> None:
        """Nobody looks."""


class _Bar:
    """How far a file is, where texts go elsewhere than to the terminal."""

    def __init__(self, path: str):
        from spec_t5x.inference.decoding_progress import DecodingProgress
        from spec_t5x.inference.sources import file_source

        self._total = sum(1 for _ in file_source(path).raw())
        self._progress = DecodingProgress()

    def __enter__(self) -> "_Bar":
        self._progress.__enter__()
        self._progress.decoding(self._total)
        return self

    def __exit__(self, *exception) -> None:
        self._progress.__exit__(*exception)

    def count(self, answer) -> None:
        """One more input is answered."""
        from spec_t5x.inference.answering import tally_of

        self._progress.count(tally_of([answer]))


def _bar(args) -> "_Bar | _NoBar":
    shown = args.input not in (None, "-") and sys.stderr.isatty() and not sys.stdout.isatty()
    return _Bar(args.input) if shown else _NoBar()


def _json(generation) -> str:
    return json.dumps(dataclasses.asdict(generation), ensure_ascii=False, allow_nan=False)


def _json_error(line: Line) -> str:
    return json.dumps(
        {"line": line.number, "input": line.text, "error": line.error}, ensure_ascii=False
    )


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
