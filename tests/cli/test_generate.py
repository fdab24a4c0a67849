"""``spec-t5x generate`` and ``evaluate``: what they print, and what they refuse."""

import dataclasses
import gzip
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_t5x.errors import InputError
from spec_t5x.generation import Answer, GenerateOptions, Generator
from spec_t5x.types import EOS_ID
from tests.cli.results import Result, assert_refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

REPOSITORY = Path(__file__).parents[2]
TEXTS = ["My sister", "Der alte Tisch", "a green bird"]
OPTIONS = GenerateOptions(gamma=3, max_decode_len=16)
SAMPLED = dataclasses.replace(OPTIONS, temperature=1.0, seed=3)
SAMPLED_FLAGS = ("--temperature", "1", "--seed", "3")
KEYS = [
    "input",
    "output",
    "output_ids",
    "score",
    "target_calls",
    "proposed",
    "accepted",
    "accepted_by_position",
    "verified_by_position",
    "block_efficiency",
    "alpha",
]


@pytest.fixture
def generate(run, tiny_pair):
    """Provides ``generate(*arguments)`` with the tiny pair and its options."""
    usual = {
        "--target": tiny_pair / "target",
        "--draft": tiny_pair / "draft",
        "--gamma": 3,
        "--max_decode_len": 16,
    }

    def run_generate(*arguments) -> Result:
        flags = [part for flag in usual.items() if flag[0] not in arguments for part in flag]
        return run("generate", *flags, *arguments)

    return run_generate


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


@pytest.fixture(scope="module")
def greedy(generator, quick_compilation):
    return [group[0] for group in generator.generate(TEXTS, OPTIONS)]


@pytest.fixture(scope="module")
def sampled(generator, quick_compilation):
    return [group[0] for group in generator.generate(TEXTS, SAMPLED)]


@pytest.fixture
def file_of_texts(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


def outputs_of(generations) -> list[str]:
    return [generation.output for generation in generations]


def with_stdin(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# --- what is printed ---------------------------------------------------------


def test_texts_come_as_arguments_from_a_file_or_from_standard_input(
    generate, greedy, file_of_texts, monkeypatch
):
    expected = Result(0, outputs_of(greedy), [])
    assert generate(*TEXTS) == expected
    assert generate("--input", file_of_texts) == expected
    file_of_texts.write_text("\n".join(TEXTS), encoding="utf-8-sig")
    assert generate("--input", file_of_texts) == expected
    with_stdin(monkeypatch, "\n".join([*TEXTS, ""]).encode())
    assert generate() == expected
    for flags in (("--input", "-"), ("-",)):
        with_stdin(monkeypatch, "\r\n".join(TEXTS).encode())
        assert generate(*flags) == expected


def test_json_holds_the_documented_keys_with_the_generators_values(generate, greedy):
    result = generate("--json", *TEXTS)
    assert (result.status, result.errors) == (0, [])
    for line, generation in zip(result.lines, greedy, strict=True):
        values = json.loads(line)
        assert list(values) == KEYS
        assert values == dataclasses.asdict(generation)


def test_without_a_draft_the_text_is_the_same_and_nothing_is_accepted(generate, greedy):
    result = generate("--json", "--draft", "none", *TEXTS)
    assert result.status == 0
    for line, generation in zip(result.lines, greedy, strict=True):
        values = json.loads(line)
        assert list(values) == KEYS
        assert values["output_ids"] == generation.output_ids
        assert values["target_calls"] == len(generation.output_ids)
        assert {values[key] for key in KEYS[5:]} == {None}


def test_several_decodes_of_an_input_are_as_many_lines(generate):
    flags = ("--num_decodes", 3, *SAMPLED_FLAGS)
    lines = generate(*flags, *TEXTS[:2]).lines
    assert len(lines) == 6
    objects = [json.loads(line) for line in generate("--json", *flags, *TEXTS[:2]).lines]
    assert [o["output"] for o in objects] == lines
    for first in (0, 3):
        scores = [o["score"] for o in objects[first : first + 3]]
        assert scores == sorted(scores, reverse=True)


def test_a_seed_gives_its_text_again_and_another_one_another_text(generate, sampled):
    assert generate(*SAMPLED_FLAGS, *TEXTS).lines == outputs_of(sampled)
    assert generate("--temperature", 1, "--seed", 4, *TEXTS).lines != outputs_of(sampled)


def test_outputs_end_before_any_of_the_texts_to_stop_at(generate, greedy):
    stop = greedy[0].output[3:7]
    (line,) = generate("--stop", "not there", "--stop", stop, TEXTS[0]).lines
    assert line == greedy[0].output.partition(stop)[0] != greedy[0].output
    assert_refused(generate("x", "--stop", "a", "--beams", 2), "--beams is 2 and stop")


# --- streaming ---------------------------------------------------------------


def test_a_terminal_gets_the_same_text_piece_by_piece(generate, sampled, tmp_path, monkeypatch):
    """And the lines after bad ones, at their places in the file."""
    texts = tmp_path / "texts"
    texts.write_bytes("\n".join([TEXTS[0], "", "Stra\xdfe", *TEXTS[1:]]).encode("latin-1"))
    whole = generate("--input", texts, *SAMPLED_FLAGS)
    pieces = []
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (pieces.append(text), write(text))[1])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate("--input", texts, *SAMPLED_FLAGS) == whole
    assert whole.lines[:3] == [sampled[0].output, "", ""]
    assert (whole.status, len(whole.lines)) == (2, 5)
    # More writes than lines and line ends.
    assert len([piece for piece in pieces if piece.strip()]) > 4


@pytest.mark.parametrize("terminal", [True, False], ids=["streamed", "whole"])
def test_an_input_that_comes_to_no_text_costs_the_others_nothing(
    generate, greedy, monkeypatch, terminal
):
    collect, stream = Generator.collect, Generator.stream
    ill = InputError("not finite")

    def some(self, batch, decoded, options):
        for text, answer in zip(batch.texts, collect(self, batch, decoded, options), strict=True):
            yield Answer(error=ill) if text == TEXTS[1] else answer

    def some_streams(self, text, options, place):
        if text == TEXTS[1]:
            raise ill
        return stream(self, text, options, place=place)

    monkeypatch.setattr(Generator, "collect", some)
    monkeypatch.setattr(Generator, "stream", some_streams)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    result = generate(*TEXTS)
    expected = outputs_of(greedy)
    assert result.lines == [expected[0], "", *expected[2:]]
    assert (result.status, result.errors) == (2, ["spec-t5x: line 2: not finite"])
    line = json.loads(generate("--json", *TEXTS).lines[1])
    assert line == {"line": 2, "input": TEXTS[1], "error": "not finite"}


@pytest.fixture
def typing(monkeypatch):
    """Provides ``typing(*lines)``: a user at a terminal; it returns prompts and outputs."""

    def begin(*lines):
        shown, waiting, write = [], iter(lines), sys.stdout.write

        def read(prompt):
            shown.append(prompt)
            for line in waiting:
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setattr(sys.stdout, "write", lambda text: (shown.append(text), write(text))[1])
        return shown

    return begin


@pytest.mark.parametrize("flags", [(), ("--draft", "none"), ("--batch_size", 2)], ids=str)
def test_a_user_types_a_line_at_a_time(generate, greedy, typing, flags):
    shown = typing(TEXTS[0], "", " ", TEXTS[1] * 20, TEXTS[2])
    result = generate(*flags)
    first, _, third = outputs_of(greedy)
    assert "".join(shown) == f"> {first}\n> > > \n> {third}\n> \n"
    begun, refused = result.errors
    assert begun == "spec-t5x: one input a line; Ctrl-D ends"
    assert refused.startswith("spec-t5x: line 2: the text has")


def test_each_line_that_is_typed_is_traced_at_once(generate, greedy, typing):
    shown = typing(*TEXTS[:2])
    generate("--trace")
    prompts = [n for n, piece in enumerate(shown) if piece == "> "]
    for (start, end), generation in zip(itertools.pairwise(prompts), greedy[:2], strict=True):
        trace = "".join(shown[start + 1 : end]).splitlines()
        assert len(trace) >= generation.target_calls


# --- traces and comparisons --------------------------------------------------


def test_trace_prints_a_line_for_each_iteration(generate, generator, greedy):
    """Marked ones, where standard output is no terminal, and below them what the marks mean."""
    result = generate("--trace", *TEXTS)
    assert (result.status, result.errors) == (0, [])
    lines = iter(result.lines)
    for generation in greedy:
        *_, last = itertools.islice(lines, generation.target_calls)
        assert next(lines).endswith(": accepted, [-rejected-], {+the target's own+}")
        words = [
            word.removeprefix("{+").removesuffix("+}")
            for word in last.split(" ")[1:]
            if not word.startswith("[-")
        ]
        ids = generation.output_ids
        pieces = ["[END]" if i == EOS_ID else piece_of(generator.vocabulary, i) for i in ids]
        assert words == pieces
    assert list(lines) == []


def piece_of(vocabulary, token: int) -> str:
    return vocabulary.piece(token) if token < vocabulary.vocab_size else f"<{token}>"


def test_a_comparison_is_a_table(generate, greedy):
    result = generate("--compare", "--batch_size", 2, *TEXTS)
    assert (result.status, result.errors) == (0, [])
    assert result.lines[:3] == outputs_of(greedy)
    (verdict,) = [line for line in result.lines if "outputs" in line]
    assert "identical" in verdict


def test_a_comparison_is_the_last_json_object_and_goes_on_without_bad_lines(
    generate, greedy, tmp_path
):
    path = tmp_path / "texts"
    path.write_text("\n".join(["", *TEXTS]))
    result = generate("--compare", "--json", "--batch_size", 2, "--input", path)
    assert (result.status, len(result.errors)) == (2, 1)
    bad, *outputs, last = map(json.loads, result.lines)
    assert bad["line"] == 1
    assert [o["output_ids"] for o in outputs] == [g.output_ids for g in greedy]
    assert list(last) == ["comparison"]
    comparison = last["comparison"]
    assert comparison["identical"] is True
    assert comparison["num_inputs"] == 3
    assert comparison["target_calls"] == sum(g.target_calls for g in greedy)
    ratio = comparison["speculative_tokens_per_second"] / comparison["plain_tokens_per_second"]
    assert comparison["speed_up"] == pytest.approx(ratio)
    path.write_text("\n")
    result = generate("--compare", "--input", path)
    assert (result.status, result.lines, len(result.errors)) == (2, [], 2)
    assert "no input is left" in result.errors[1]


# --- gin ---------------------------------------------------------------------


@pytest.fixture
def gin_file(tmp_path, tiny_pair) -> Path:
    """Writes a run with a macro, whose target's path holds a space."""
    (tmp_path / "a pair").symlink_to(tiny_pair)
    path = tmp_path / "run.gin"
    path.write_text(
        "# 'GAMMA' stands in quotes: \"%NOT_A_MACRO\n"
        "Models.target = %TARGET\n"
        f"Models.draft = '{tiny_pair / 'draft'}'  # %NOR_THIS\n"
        "GAMMA = 3\n"
        "GenerateOptions.gamma = %GAMMA\n"
        "GenerateOptions.max_decode_len = 16\n"
    )
    return path


def gamma_of(result: Result) -> int:
    assert (result.status, result.errors) == (0, [])
    (values,) = map(json.loads, result.lines)
    return values["proposed"] // values["target_calls"]


def test_gin_files_bind_bindings_override_files_and_flags_override_both(run, gin_file, tmp_path):
    target = f"--gin.TARGET='{tmp_path / 'a pair' / 'target'}'"
    command = ("generate", "--json", f"--gin_file={gin_file}", target)
    assert gamma_of(run(*command, TEXTS[0])) == 3
    assert gamma_of(run(*command, "--gin.GAMMA=2", TEXTS[0])) == 2
    assert gamma_of(run(*command, "--gin.GenerateOptions.gamma=2", TEXTS[0])) == 2
    assert gamma_of(run(*command, "--gin.GAMMA=2", "--gamma", 3, TEXTS[0])) == 3


# --- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("--gin.GenerateOptions.gamma='four'", "gamma is 'four'"),
        ("--gin.Models.target=5", "Models.target is 5"),
        ("--gin.Nothing.gamma=1", "'Nothing'"),
        ("--gin.GenerateOptions.gama=1", "'gama'"),
        ("--gin.GenerateOptions.gamma=(1", "multi-line statement"),
        ("--gin.GenerateOptions.gamma=", "--gin.GenerateOptions.gamma="),
    ],
)
def test_bindings_that_cannot_be_are_refused(run, unchecked, binding, expected):
    assert_refused(run("generate", binding, "x"), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((" ",), "the text is empty"),
        (("Es regnet. " * 20,), "raise --max_source_len, or pass --truncate"),
        (
            ("x", "--top_k", 3, "--top_p", 0.5),
            "--top_k is 3 and --top_p is 0.5: set one",
        ),
        (("x", "--gamma", 3, "--gamma", 3), "--gamma was given twice"),
        (("x", "--gamma", 100), "--gamma is 100 and --max_decode_len 16"),
        (("x", "--dtype", "int8"), "'int8'"),
        (("x", "--compare", "--trace"), "both --trace and --compare"),
        (("x", "--trace", "--draft", "none"), "--trace needs a draft"),
        (("x", "--widths", "3,a"), "'3,a' is no list of numbers"),
        (("x", "--beams", 2, "--trace"), "--trace shows no beam search"),
        (("x", "--trace", "--num_decodes", 2, "--temperature", 1), "--trace shows 1"),
        (("x", "--num_decodes", 3), "is 3 and temperature 0, which gives one text"),
        (("x", "--input", "file"), "--input file"),
        (("--input", "/no/such/file"), "/no/such/file"),
        (("Stra\udcdfe",), r"Stra\udcdfe"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_one_line(generate, arguments, expected):
    assert_refused(generate(*arguments), expected)


def test_a_line_that_is_not_utf_8_is_an_error_of_its_own(generate, greedy, tmp_path, monkeypatch):
    path, (first, second, _) = tmp_path / "latin", TEXTS
    path.write_bytes(f"{first}\nStra\xdfe\n{second}\n".encode("latin-1"))
    expected = [greedy[0].output, "", greedy[1].output]
    said = [
        "spec-t5x: line 2: byte 5 is 0xdf, not UTF-8: convert the file (iconv -t utf-8), or fix "
        "the line"
    ]
    assert generate("--input", path) == Result(2, expected, said)
    with_stdin(monkeypatch, path.read_bytes())
    assert generate() == Result(2, expected, said)


def test_a_file_may_be_gzipped_and_of_json_lines(generate, greedy, tmp_path):
    objects = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(each) + "\n" for each in objects).encode()
    (tmp_path / "texts.jsonl").write_bytes(lines)
    (tmp_path / "texts.txt.gz").write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    named = lines.replace(b'"text"', b'"said"')
    (tmp_path / "named.json").write_bytes(named)
    expected = Result(0, outputs_of(greedy), [])
    assert generate("--input", tmp_path / "texts.jsonl") == expected
    assert generate("--input", tmp_path / "texts.txt.gz", "--batch_size", 2) == expected
    assert generate("--input", tmp_path / "named.json", "--field", "said") == expected


def test_lines_are_answered_before_standard_input_ends(program, greedy, tiny_pair):
    command, env = program
    with subprocess.Popen(
        [*command, "--draft", str(tiny_pair / "draft")],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write("\n")
        for text, generation in zip(TEXTS, greedy, strict=True):
            process.stdin.write(text + "\n")
            process.stdin.flush()
            if generation is greedy[0]:
                assert process.stdout.readline() == "\n"
            assert process.stdout.readline().rstrip("\n") == generation.output
        process.stdin.close()
        said = [line for line in process.stderr.read().splitlines() if "ing " not in line]
        assert said == ["spec-t5x: line 1: the text is empty: give at least one word"]
        assert process.wait() == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("genrate", "x"), "there is no 'genrate', did you mean 'generate'?"),
        (("generate", "x", "--top-p", "0.9"), "'--top-p', did you mean '--top_p'?"),
        (("generate", "x", "--max_new_tokens", "9"), "unknown argument '--max_new_tokens'"),
        (("convert", "a", "b", "--to", "nativ"), "there is no 'nativ', did you mean 'native'?"),
    ],
)
def test_the_likeliest_meant_is_named(run, arguments, expected):
    assert_refused(run(*arguments), expected)


def test_a_terminal_with_nothing_to_say_is_told_what_to_give(generate, monkeypatch):
    with_stdin(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert_refused(generate(), "give TEXT")


def test_a_command_is_needed(run):
    assert_refused(run(), "COMMAND")
    assert_refused(run("translate", "x"), "'translate'")


@pytest.mark.parametrize("flag", ["--target", "--draft"])
def test_missing_and_damaged_checkpoints_are_refused(generate, tiny_pair, tmp_path, flag):
    assert_refused(generate("x", flag, tmp_path / "absent"), str(tmp_path / "absent"))
    assert_refused(generate("x", flag, tmp_path), str(tmp_path), "config.json")
    directory = tmp_path / "broken"
    shutil.copytree(tiny_pair / "target", directory)
    for path in (directory / "params").glob("d/*"):
        path.write_bytes(path.read_bytes()[:8])
    assert_refused(generate("x", flag, directory), str(directory))


def test_another_target_needs_a_draft_of_its_own(run, tiny_pair):
    result = run("generate", "x", "--target", tiny_pair / "target")
    message = f"no --draft was given for --target {tiny_pair / 'target'}: give --draft int8, which"
    assert_refused(result, message, "or --draft none")


def test_bad_lines_of_a_file_are_reported_and_the_others_answered(generate, greedy, tmp_path):
    path = tmp_path / "texts"
    path.write_text("\n".join([TEXTS[0], "", TEXTS[1], "Es regnet. " * 20, TEXTS[2]]))
    result = generate("--input", path, "--batch_size", 2)
    empty, long = result.errors
    assert "line 2: the text is empty" in empty
    assert "line 4: the text has" in long
    first, second, third = outputs_of(greedy)
    assert (result.status, result.lines) == (2, [first, "", second, "", third])
    result = generate("--input", path, "--batch_size", 2, "--json")
    values = [json.loads(line) for line in result.lines]
    assert [v.get("output") for v in values] == [first, None, second, None, third]
    assert [list(values[n]) for n in (1, 3)] == [["line", "input", "error"]] * 2
    assert values[1]["line"] == 2 and values[1]["error"] in empty


@pytest.mark.parametrize("command", ["generate", "infer", "evaluate"])
@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        (("--num_beams", "4"), "'--num_beams': it is '--beams' here"),
        (("--max-new-tokens=4",), "'--max-new-tokens=4': it is '--max_decode_len' here"),
        (("--num_return_sequences", "2"), "it is '--num_decodes' here"),
        (("--do_sample",), "'--do_sample': it is '--temperature' here"),
        (("--assistant_model", "x"), "it is '--draft' here"),
        (("--logprobs",), "'--logprobs': an output has a score, its tokens have none"),
        (("--batch_sizes", "2"), "'--batch_sizes', did you mean '--batch_size'?"),
    ],
)
def test_a_flag_of_another_program_is_refused_with_ours(run, command, flag, hint):
    result = run(command, *flag)
    assert_refused(result, "unknown argument", hint, f": see spec-t5x {command} --help")


def test_train_names_the_settings_that_nothing_binds(run, tmp_path, unchecked):
    (tmp_path / "empty.gin").touch()
    assert_refused(run("train", "--gin_file", tmp_path / "empty.gin"), "'output_dir'")


# --- as a program ------------------------------------------------------------


@pytest.fixture
def program(tiny_pair, kept_programs):
    """Provides arguments and environment of ``spec-t5x generate`` in another process."""
    command = [sys.executable, "-m", "spec_t5x.cli.main", "generate"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        # As in this process, so that it finds the programs that were compiled here.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": kept_programs,
    }
    command += ["--target", tiny_pair / "target", "--gamma", "3", "--max_decode_len", "16"]
    return [*map(str, command)], environment


def test_a_reader_that_leaves_is_no_error(monkeypatch, generate, tmp_path):
    """``spec-t5x generate … | head -1``"""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert generate(*TEXTS).status == 0
