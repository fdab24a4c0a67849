"""``spec-t5x generate`` and ``evaluate``: what they print, and what they refuse."""

import dataclasses
import gzip
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spec_t5x import registry
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.errors import InputError
from spec_t5x.generation import Answer, GenerateOptions, Generator
from spec_t5x.types import EOS_ID
from tests.child import HANGS
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
def unread(monkeypatch):
    """Lets a test fail that reads weights."""
    fail = lambda *_, **__: pytest.fail("weights are read")  # noqa: E731
    monkeypatch.setattr(StoredModel, "read_params", fail)


def outputs_of(generations) -> list[str]:
    return [generation.output for generation in generations]


def with_stdin(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# --- what is printed ---------------------------------------------------------


def test_texts_come_as_arguments_from_a_file_or_from_standard_input(
    generate, greedy, tmp_path, monkeypatch
):
    expected = Result(0, outputs_of(greedy), [])
    assert generate(*TEXTS) == expected
    objects = "".join(json.dumps({"id": n, "said": text}) + "\n" for n, text in enumerate(TEXTS))
    files = {
        "utf8.txt": "\n".join(TEXTS).encode("utf-8-sig"),
        "zipped.txt.gz": gzip.compress("".join(f"{text}\n" for text in TEXTS).encode()),
        "lines.jsonl": objects.replace("said", "text").encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert generate("--input", tmp_path / name) == expected
    (tmp_path / "named.json").write_text(objects)
    assert generate("--input", tmp_path / "named.json", "--field", "said") == expected
    for flags in ((), ("--input", "-"), ("-",)):
        with_stdin(monkeypatch, "\r\n".join(TEXTS).encode())
        assert generate(*flags) == expected
    with_stdin(monkeypatch, "\n".join(TEXTS).encode())
    for flags in ((), ("-",)):
        with_stdin(monkeypatch, objects.encode())
        assert generate("--field", "said", *flags) == expected
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=[files["lines.jsonl"]], daemon=True).start()
    with_stdin(monkeypatch, b"")
    assert generate("--input", pipe) == expected
    with_stdin(monkeypatch, "\n".join(TEXTS).encode())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert generate() == expected._replace(errors=["spec-t5x: enter a text per line; Ctrl-D ends"])


def test_json_holds_the_documented_keys_with_the_generators_values(generate, greedy):
    result, plain = generate("--json", *TEXTS), generate("--json", "--draft", "none", *TEXTS)
    assert (result.status, result.errors) == (plain.status, plain.errors) == (0, [])
    for line, without, generation in zip(result.lines, plain.lines, greedy, strict=True):
        assert list(json.loads(line)) == KEYS
        assert json.loads(line) == dataclasses.asdict(generation)
        values = json.loads(without)
        assert list(values) == KEYS and {values[key] for key in KEYS[5:]} == {None}
        assert values["output_ids"] == generation.output_ids
        assert values["target_calls"] == len(generation.output_ids)


def test_several_decodes_of_an_input_are_as_many_lines(generate):
    flags = ("--num_decodes", 3, *SAMPLED_FLAGS, *TEXTS[:2])
    lines, objects = generate(*flags).lines, map(json.loads, generate("--json", *flags).lines)
    assert [each["output"] for each in objects] == lines and len(lines) == 6


def test_outputs_end_before_any_of_the_texts_to_stop_at(generate, greedy):
    stop = greedy[0].output[3:7]
    (line,) = generate("--stop", "not there", "--stop", stop, TEXTS[0]).lines
    assert line == greedy[0].output.partition(stop)[0] != greedy[0].output
    assert_refused(generate("x", "--stop", "a", "--beams", 2), "--stop is ('a',) and beams 2")


# --- streaming ---------------------------------------------------------------


def test_a_terminal_gets_the_same_text_piece_by_piece(generate, sampled, tmp_path, monkeypatch):
    """Lines after bad ones are printed, too, at their places in the file."""
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


@pytest.mark.parametrize("terminal", [True, False], ids=["streamed", "whole"])
def test_a_draft_that_was_left_out_is_reported_after_several_texts(generate, monkeypatch, terminal):
    monkeypatch.setattr(Generator, "verdict", lambda self, options: "the draft was left out")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert generate(*TEXTS).errors == ["spec-t5x: the draft was left out"]
    assert generate(TEXTS[0]).errors == generate("--trace", *TEXTS).errors == []


# --- traces and comparisons --------------------------------------------------


def test_trace_prints_a_line_for_each_iteration(generate, generator, greedy):
    """Lines have marks if standard output is no terminal, and below them what the marks mean."""
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


def test_a_comparison_is_a_table_or_the_last_json_object(generate, greedy, tmp_path):
    flags = ("--compare", "--batch_size", 2)
    result = generate(*flags, *TEXTS)
    assert (result.status, result.errors) == (0, [])
    assert result.lines[:3] == outputs_of(greedy)
    (verdict,) = [line for line in result.lines if "outputs" in line]
    assert "identical" in verdict
    path = tmp_path / "texts"
    path.write_text("\n".join(["", *TEXTS]))
    result = generate(*flags, "--json", "--input", path)
    assert (result.status, len(result.errors)) == (2, 1)
    bad, *outputs, last = map(json.loads, result.lines)
    assert bad["line"] == 1
    assert [o["output_ids"] for o in outputs] == [g.output_ids for g in greedy]
    assert list(last) == ["comparison"] and last["comparison"]["identical"] is True
    path.write_text("\n")
    result = generate("--compare", "--input", path)
    assert (result.status, result.lines, len(result.errors)) == (2, [], 2)
    assert "all inputs have errors" in result.errors[1]


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
        ("--gin.Models.target=5", "target is 5: give a value of type str"),
        ("--gin.Nothing.gamma=1", "'Nothing'"),
        ("--gin.GenerateOptions.gama=1", "'gama'"),
        ("--gin.GenerateOptions.gamma=(1", "multi-line statement"),
        ("--gin.a/b/GenerateOptions.gamma=1", "GenerateOptions in the scope a/b: leave a/b/ out"),
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
        (("x", "--gamma", 100), "--gamma is 100 and --max_decode_len 16"),
        (("x", "--dtype", "int8"), "'int8'"),
        (("x", "--compare", "--trace"), "both --trace and --compare"),
        (("x", "--trace", "--draft", "none"), "--trace needs a draft"),
        (("x", "--widths", "3,a"), "'3,a' is no list of numbers"),
        (("x", "--trace", "--gamma", 0), "--gamma is 0, which drafts nothing: --trace needs"),
        (("x", "--beams", 2, "--trace"), "--beams is 2 and --trace has no beam search"),
        (("x", "--trace", "--num_decodes", 2, "--temperature", 1), "--trace needs 1"),
        (("x", "--num_decodes", 3), "--num_decodes is 3, temperature 0.0 and --top_k 0, which"),
        (("x", "--input", "file"), "--input file"),
        (("--input", "/no/such/file"), "/no/such/file"),
        (("--input", "/dev/null"), "/dev/null is a pipe or a device, which is read once"),
        (("--input", "/"), "/ is a folder: give a file"),
        (("--input", "of two\nlines"), "no file of two lines: give the path of"),
        (("x", "--field", "a"), "--field is a, which only JSON lines have: leave it out"),
        (("Stra\udcdfe",), r"Stra\udcdfe"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_one_line(generate, arguments, expected):
    assert_refused(generate(*arguments), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--draft", "copy", "--verifier", "tree"),
            "--verifier is 'tree' and draft 'copy' proposes no trees",
        ),
        (("--draft", "mixed:int8", "--verifier", "multi"), "'mixed:int8' proposes no trees"),
        (
            ("--gamma", "auto", "--verifier", "tree", "--widths", "4,4,4"),
            "--widths are (4, 4, 4) and gamma is auto, which takes trees of up to 4 widths and 64",
        ),
        (
            ("--gamma", 4, "--verifier", "tree", "--widths", "9,9,9"),
            "tree (9, 9, 9, 1) has 1549 nodes: give at most 256",
        ),
        (("--draft", "int8", "--beams", 2), "--beams is 2, gamma 3 and draft 'int8', but in a"),
        (
            ("--draft", "transformer:t5-draft", "--draft_temperature", "1", "--beams", 2),
            "only a model without --draft_temperature drafts: give a separate one, or gamma 0",
        ),
    ],
)
def test_a_draft_that_cannot_is_refused_before_a_model_is_read(generate, arguments, expected):
    """The target is no checkpoint that could be read."""
    assert_refused(generate("x", "--target", "google/none", *arguments), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Options that no part of the draft takes, as flags and in gin.
        (("--draft", "mixed:copy", "--draft_temperature", 1), "'mixed:copy' takes no temperature"),
        (
            ("--gin.Models.draft=mixed:uniform", "--gin.Models.draft_weights=int8"),
            "'mixed:uniform' has no weights of a model",
        ),
        # Drafts of another kind, target or size.
        (("--draft", "copy:0"), "draft copy:0: give a whole number from 1"),
        (("--draft", "ngram:t5-draft"), "config.json has format 'spec_t5x', not 'spec_t5x_ngram'"),
        (("--draft", "eagle:t5-draft"), "config.json has format 'spec_t5x', not 'spec_t5x_eagle'"),
        (("--draft", "mixed:t5-eagle", "--target", "{tiny}"), "draft layers"),
        (("--draft", "t5-ngram", "--target", "{tiny}"), "have different vocabularies"),
        (
            ("--draft", "transformer:t5-eagle"),
            "t5-eagle holds a draft, not a whole model: give it as",
        ),
        (("--draft", "t5-draft", "--target", "{tiny}"), "have different vocabularies"),
        # Options of decoding that do not fit the checkpoint.
        (("--suppress_tokens", "9999"), "has token 9999 and the model 8000 tokens: give lower ids"),
        (("--min_decode_len", 199), "--min_decode_len is 199 and outputs have at most 128"),
        (("--beams", 4001, "--gamma", 0), "--beams is 4001: give at least 0, at most 4000"),
        (
            ("--beams", 2, "--early_stopping", "true", "--gamma", 0),
            "give a --length_penalty as well",
        ),
        (
            ("--suppress_tokens", "1,5", "--forced_eos_token_id", "5"),
            "and --suppress_tokens have [5]: leave one out",
        ),
        (("y", ""), "the text is empty"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    run, unread, tiny_pair, arguments, expected
):
    arguments = [str(each).format(tiny=tiny_pair / "target") for each in arguments]
    assert_refused(run("generate", "x", *arguments), expected)


def test_a_gin_file_registers_a_verifier_and_binds_it(generate, greedy, tmp_path, monkeypatch):
    monkeypatch.setitem(registry._PLACES, "verifier", dict(registry._PLACES["verifier"]))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "its_verifiers.py").write_text(
        "from spec_t5x.registry import register\n"
        "register('verifier', ours='spec_t5x.verifiers:TokenVerifier')\n"
    )
    (tmp_path / "ours.gin").write_text("import its_verifiers\nGenerateOptions.verifier = 'ours'\n")
    result = generate(*TEXTS[:1], "--gin_file", tmp_path / "ours.gin")
    assert (result.status, result.lines) == (0, [greedy[0].output])


@pytest.mark.parametrize(
    "command",
    ["generate x", "infer --input {0} --output_dir {1}/out", "evaluate --data {0}", "acceptance x",
     "benchmark --data {0}"],
)  # fmt: skip
def test_every_command_refuses_a_draft_of_another_kind_before_weights_are_read(
    run, unread, tmp_path, command
):
    (data := tmp_path / "pairs.tsv").write_text("a\tb\n")
    arguments = [word.format(data, tmp_path) for word in command.split()]
    assert_refused(run(*arguments, "--draft", "ngram:t5-draft"), "not 'spec_t5x_ngram'")
    assert not (tmp_path / "out").exists()


def test_a_bad_line_of_standard_input_costs_the_others_nothing(generate, greedy, monkeypatch):
    for flags in ((), ("-",), ("--input", "-")):
        with_stdin(monkeypatch, f"{TEXTS[0]}\n\n{TEXTS[1]}".encode())
        found = generate(*flags)
        assert found.status == 2 and found.lines == [greedy[0].output, "", greedy[1].output]
        assert found.errors == ["spec-t5x: line 2: the text is empty: give at least one word"]


def test_a_bad_line_takes_as_many_lines_as_a_good_one(generate, monkeypatch):
    with_stdin(monkeypatch, f"\n{TEXTS[1]}".encode())
    found = generate("--num_decodes", "3", "--temperature", "1")
    assert found.lines[:3] == [""] * 3 and len(found.lines) == 6


def test_an_interruption_while_it_waits_for_a_line(tiny_pair):
    command = [sys.executable, "-m", "spec_t5x.cli.main", "generate", "--gamma", "0"]
    command += ["--target", str(tiny_pair / "target"), "--draft", "none", "--max_decode_len", "4"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, text=True, **pipes
    ) as process:
        process.stdin.write("a\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        # With standard input still open.
        assert process.wait(HANGS) == 130
        assert "Fatal" not in process.stderr.read()


def test_lines_are_answered_before_standard_input_ends(greedy, tiny_pair, kept_programs):
    command = [sys.executable, "-m", "spec_t5x.cli.main", "generate", "--gamma", "3"]
    command += ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        # As in this process, so that it finds the programs that were compiled here.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": kept_programs,
    }
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        [*command, "--max_decode_len", "16"], env=os.environ | environment, text=True, **pipes
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


@pytest.mark.parametrize("flag", ["--target", "--draft"])
def test_missing_and_damaged_checkpoints_are_refused(generate, tiny_pair, tmp_path, flag):
    assert_refused(generate("x", flag, tmp_path / "absent"), str(tmp_path / "absent"))
    assert_refused(generate("x", flag, tmp_path), str(tmp_path), "config.json")
    directory = tmp_path / "broken"
    shutil.copytree(tiny_pair / "target", directory)
    for path in (directory / "params").glob("d/*"):
        path.write_bytes(path.read_bytes()[:8])
    assert_refused(generate("x", flag, directory), str(directory))


def test_bad_lines_of_a_file_are_reported_and_the_others_answered(
    generate, greedy, tmp_path, monkeypatch
):
    path, (first, second, third) = tmp_path / "texts", outputs_of(greedy)
    lines = [TEXTS[0], "", TEXTS[1], "Es regnet. " * 20, TEXTS[2], "Stra\xdfe"]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    result = generate("--input", path, "--batch_size", 2)
    empty, long, latin = result.errors
    assert long.endswith("raise --max_source_len, or pass --truncate")
    assert "line 2: the text is empty" in empty and "line 4: the text has" in long
    assert "line 6: byte 5 is 0xdf, not UTF-8: convert the file (iconv -t utf-8)" in latin
    assert (result.status, result.lines) == (2, [first, "", second, "", third, ""])
    objects = generate("--input", path, "--batch_size", 2, "--json")
    values = [json.loads(line) for line in objects.lines]
    assert [v.get("output") for v in values] == [first, None, second, None, third, None]
    assert [list(values[n]) for n in (1, 3)] == [["line", "input", "error"]] * 2
    assert values[1]["line"] == 2 and values[1]["error"] in empty
    with_stdin(monkeypatch, path.read_bytes())
    assert generate() == result


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "COMMAND"),
        (("translate", "x"), "'translate'"),
        (("genrate", "x"), "there is no 'genrate', did you mean 'generate'?"),
        (("generate", "--verifier", "blok"), "--verifier is 'blok', did you mean 'block'?"),
        (("convert", "a", "b", "--to", "nativ"), "--to is 'nativ': choose one of t5x, "),
        (("generate", "x", "--top-p", "0.9"), "'--top-p', did you mean '--top_p'?"),
        (("generate", "x", "--temp", "1"), "'--temp', did you mean '--temperature'?"),
        (("generate", "x", "--widths", "3,2"), ": --widths are (3, 2) and verifier 'block': use m"),
        (("generate", "x", "--stop", ""), ": --stop is '': give texts of at least one character"),
        (("generate", "--num_beams", "4"), "'--num_beams': it is '--beams' here"),
        (("generate", "--data", "lines.txt"), "'--data': it is '--input' here"),
        (("infer", "--max-new-tokens=4"), "'--max-new-tokens=4': it is '--max_decode_len' here"),
        (("infer", "--logprobs"), "an output has one score, its tokens have none"),
        (("evaluate", "--batch_sizes", "2"), "did you mean '--batch_size'?: see spec-t5x evaluate"),
        (("generate", "x", "--target", "{pair}"), "for target {pair}: give --draft int8, which"),
        (
            ("generate", "x", "--target", "t5-targt"),
            "t5-targt, did you mean 't5-target'?: give the path",
        ),
        (("generate", "x", "--target", ""), "--target is '': give a name, or leave it out"),
        (("generate", "x", "--draft", ""), "--draft is '': give a name, or leave it out"),
        (
            ("generate", "{pair}/model", "x"),
            "'{pair}/model' is a model's directory: give it as --t",
        ),
        (("convert", "", "{pair}/a", "--to", "native"), "or model is named '': give a name"),
        (("convert", "t5-target", "", "--to", "native"), "or model is named '': give a name"),
        (("train", "--gin_file", "{pair}/empty.gin"), "'output_dir'"),
    ],
)
def test_mistakes_are_refused_with_what_is_meant(run, tmp_path, unchecked, arguments, hint):
    (tmp_path / "empty.gin").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    result = run(*[argument.format(pair=tmp_path) for argument in arguments])
    assert_refused(result, hint.format(pair=tmp_path))


# --- as a program ------------------------------------------------------------
