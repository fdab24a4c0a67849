"""``spec-t5x generate``: the main job. Text in, the target's text out, sooner."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator

from spec_t5x.cli import settings
from spec_t5x.errors import InputError

HELP = "generate text with a target, sped up by a draft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="an input; more are more inputs")
    parser.add_argument("--input", metavar="FILE", help="one input a line; - is standard input")
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
    """One input: its text, and why it cannot be decoded if it cannot."""

    number: int
    text: str
    error: str | None = None


def run(args: argparse.Namespace) -> int:
    """Generates; exit status 2 if any input was bad."""
    from spec_t5x.compilation_cache import enable

    models, options = settings.read(args)
    draft = models.draft_name()
    _check_flags(args, options, draft)
    texts = list(_read_texts(args))
    enable()

    from spec_t5x.generation import Generator

    generator = Generator.load(
        models.target, draft, models.draft_options(), vocabulary=models.vocabulary
    )
    from_file = not args.text
    lines = [_check(generator, n, text, options) for n, text in enumerate(texts, 1)]
    for line in lines:
        if line.error:
            if not from_file:
                raise InputError(line.error)
            _say(line)
    asked = options.gamma
    generator, options = settings.tuned(generator, _good(lines), options)
    _check_chosen(args, asked, options)

    if args.compare:
        _compare(args, generator, lines, options)
    elif args.trace:
        _trace(generator, lines, options)
    elif _streams(args, generator, options):
        _stream(generator, lines, options)
    else:
        _generate(args, generator, lines, options)
    return 2 if any(line.error for line in lines) else 0


def _check_flags(args, options, draft: str | None) -> None:
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


def _check_chosen(args, asked: int | str, options) -> None:
    if options.gamma == 0 != asked and (args.trace or args.compare):
        flag = "--trace" if args.trace else "--compare"
        raise InputError(
            f"gamma {asked} came to plain decoding and {flag} needs drafts: give gamma a number"
        )


def _read_texts(args: argparse.Namespace) -> Iterator[str]:
    if args.text:
        yield from args.text
        return
    if args.input is None and sys.stdin.isatty():
        raise InputError("no input: give TEXT, --input FILE, or pipe lines in")
    name = "-" if args.input is None else args.input
    try:
        with _open(name) as file:
            yield from (line.rstrip("\r\n") for line in file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read --input {name} ({reason}): give a text file") from error


def _open(name: str):
    if name == "-":
        return contextlib.nullcontext(sys.stdin)
    # Without the byte order mark that some editors put first.
    return open(name, encoding="utf-8-sig")


def _check(generator, number: int, text: str, options) -> Line:
    try:
        generator.tokenize(text, options)
    except InputError as error:
        return Line(number=number, text=text, error=str(error))
    return Line(number=number, text=text)


def _good(lines: list[Line]) -> list[str]:
    return [line.text for line in lines if not line.error]


def _say(line: Line) -> None:
    print(f"spec-t5x: line {line.number}: {line.error}", file=sys.stderr)


def _failed(line: Line, error: InputError) -> Line:
    """The line, whose text could be read and not decoded."""
    line = dataclasses.replace(line, error=str(error))
    _say(line)
    return line


def _generate(args, generator, lines: list[Line], options) -> None:
    """One line (or JSON object) for each output; an empty one for a bad input.

    Among ``lines``, those that come to no text get the reason.
    """
    answers = generator.answers(_good(lines), options)
    for place, line in enumerate(lines):
        answer = [] if line.error else next(answers)
        if isinstance(answer, InputError):
            lines[place] = line = _failed(line, answer)
        if line.error:
            print(_json_error(line) if args.json else "", flush=True)
            continue
        for generation in answer:
            print(_json(generation) if args.json else _one_line(generation.output), flush=True)


def _streams(args, generator, options) -> bool:
    return (
        sys.stdout.isatty()
        and not args.json
        and generator.draft is not None
        and options.num_decodes == 1
        and not options.beams
    )


def _stream(generator, lines: list[Line], options) -> None:
    """As ``_generate``, each text as it is accepted."""
    place = 0
    for number, line in enumerate(lines):
        if line.error:
            print(flush=True)
            continue
        try:
            _stream_one(generator, line.text, options, place)
        except InputError as error:
            print(flush=True)
            lines[number] = _failed(line, error)
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

    for place, text in enumerate(_good(lines)):
        print_trace(generator, text, options, place=place)


def _compare(args, generator, lines: list[Line], options) -> None:
    from spec_t5x.experiments.comparison import compare

    texts = _good(lines)
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


def _json(generation) -> str:
    return json.dumps(dataclasses.asdict(generation), ensure_ascii=False, allow_nan=False)


def _json_error(line: Line) -> str:
    return json.dumps(
        {"line": line.number, "input": line.text, "error": line.error}, ensure_ascii=False
    )


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
