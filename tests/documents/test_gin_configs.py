"""Every gin file names its macros and its command, and binds what exists."""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import gin
import jax
import pytest
from gin import resource_reader

from spec_t5x.cli import settings
from spec_t5x.cli.gin_files import read_all
from spec_t5x.cli.main import _parser
from spec_t5x.data.task_options import WMT_ENDE
from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.models.binding import abstract_params
from spec_t5x.models.sizes import size

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "gin_configs"
ALL = sorted([*CONFIGS.rglob("*.gin"), *(REPOSITORY / "examples").rglob("*.gin")])
# T5X's own programs run these; tests/t5x_plugin parses and binds them with T5X.
OF_T5X = [path for path in ALL if path.name.startswith("t5x_") or path.parent.name == "t5x"]
# Files that others include, or that are given before a run; no command runs them by themselves.
PARTS = [path for path in ALL if path.parent.name in ("models", "data")]
RUNS = [path for path in ALL if path not in (*OF_T5X, *PARTS)]

TRAININGS = {"train", "train_lm", "train_heads", "distill"}


def each(paths: list[Path]):
    ids = [str(path.relative_to(REPOSITORY)) for path in paths]
    return pytest.mark.parametrize("path", paths, ids=ids)


class Header(NamedTuple):
    """Content of the comment at the top of a gin file."""

    macros: list[str]
    # The command, as a shell splits it, and those of its words that bind macros.
    command: list[str]
    bindings: list[str]


def read_header(path: Path) -> Header:
    """Parses the header.

    Raises:
      ValueError: it lacks the macros or the command.
    """
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    lines = [line[1:] for line in comment.group().splitlines()] if comment else []
    (start,) = [n for n, line in enumerate(lines) if line.startswith(" Required macros:")]
    (first,) = [n for n, line in enumerate(lines) if line.startswith("   spec-t5x ")]
    macros, command = (
        list(itertools.takewhile(bool, part)) for part in (lines[start + 1 : first], lines[first:])
    )
    # Explanations are indented further.
    macros = re.findall(r"^   (\w+)", "\n".join(macros), re.MULTILINE)
    if not macros and not lines[start].endswith("none."):
        raise ValueError(f"{path}: name the macros, or write 'none.'")
    command = shlex.split(" ".join(line.strip().removesuffix("\\") for line in command))
    return Header(macros, command, [word for word in command if word.startswith("--gin.")])


def code_of(path: Path) -> str:
    """Returns the bindings of a file and of all that it includes, without comments."""
    return "\n".join(re.sub("#.*", "", text) for _, text in read_all([str(path)]))


def bound_names(code: str) -> set[str]:
    """Returns the configurables that some code binds parameters of."""
    return set(re.findall(r"^([\w.]+)\.\w+ *=", code, re.MULTILINE))


# Values of macros that are checked as the file is read.
VALUES = {"MIXTURE_OR_TASK_NAME": WMT_ENDE}


def build(name: str):
    """Builds a configurable from a file's bindings."""
    return gin.get_configurable(name)()


@each(RUNS)
def test_a_header_has_the_open_macros_and_a_command_that_binds_them(path, parse):
    code, header = code_of(path), read_header(path)
    used = set(re.findall(r"%(\w+)", code)) - {"gin"}
    values = re.findall(r"^(\w+) *= *(.*)", code, re.MULTILINE)
    # In the order of parsing, so that the last one holds.
    bound = {name for name, value in dict(values).items() if value != "%gin.REQUIRED"}
    assert sorted(header.macros) == sorted(used - bound)
    assert bound <= used
    program, *words = header.command
    assert program == "spec-t5x"
    named = {flag.removeprefix("--gin.").split("=")[0] for flag in header.bindings}
    assert set(header.macros) <= named
    args = _parser().parse_args([word for word in words if word not in header.bindings])
    assert args.gin_file[-1] == str(path.relative_to(REPOSITORY))
    parse(*words)
    names = bound_names(code)
    assert names
    for name in names - TRAININGS:
        build(name)
    for training in names & TRAININGS:
        check_training(training)


def check_training(name):
    """Checks that the values bound to the arguments of the training fit together."""
    built = {}
    for argument in ("model", "layers", "data", "optimizer", "options", "distillation"):
        try:
            reference = gin.query_parameter(f"{name}.{argument}")
        except ValueError:
            continue
        if reference is not None:
            built[argument] = build(repr(reference).removeprefix("@").removesuffix("()"))
    assert gin.query_parameter(f"{name}.output_dir") is not None
    built["optimizer"].build(built["options"].steps)
    data = built["data"]
    if hasattr(data, "max_length"):
        # The network has positions for the longest lines; the options check the rest.
        assert data.max_length <= built["model"].max_length
        return
    columns = getattr(data, "num_columns", None)
    assert not columns or max(data.source_column, data.target_column) < columns


@each(PARTS)
def test_a_part_has_a_description_and_can_be_built(path, parse):
    assert path.read_text(encoding="utf-8").startswith("# ")
    # It is included, or named in a header.
    assert any(path.name in other.read_text(encoding="utf-8") for other in ALL if other != path)
    code = code_of(path)
    left_open = set(re.findall(r"%(\w+)", code)) - set(re.findall(r"^(\w+) *=", code, re.MULTILINE))
    command = "train-lm" if path.name.startswith("gpt_") else "train"
    parse(
        command,
        f"--gin_file={path}",
        *(f"--gin.{macro}={VALUES.get(macro, 'dummy')}" for macro in left_open),
    )
    for name in bound_names(code) - {"DataOptions"}:
        build(name)


def test_t5x_finds_the_files_of_a_clone_from_any_folder(monkeypatch, tmp_path):
    """gin looks for a file in the package that the file's folder is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPOSITORY)
    for path in CONFIGS.rglob("*.gin"):
        assert resource_reader.system_path_file_exists(str(path.relative_to(REPOSITORY)))


@each(OF_T5X)
def test_a_file_of_t5xs_programs_names_what_exists(path):
    """T5X is needed for more than this."""
    text = path.read_text(encoding="utf-8")
    code = re.sub("#.*", "", text)
    for module, name in re.findall(r"^from (spec_t5x[\w.]*) import (\w+)", code, re.MULTILINE):
        folder = REPOSITORY.joinpath(*module.split("."))
        assert (folder / f"{name}.py").is_file()
        assert f"{name}." in code.replace(f"import {name}", "")
    for included in re.findall(r'^include "(gin_configs/.*)"', code, re.MULTILINE):
        assert (REPOSITORY / included).is_file()
    header = text[: text.index("from __gin__")]
    assert "Required macros:" in header
    assert "python -m t5x." in header
    required = re.findall(r"^(\w+) = %gin.REQUIRED", code, re.MULTILINE)
    assert all(f"#   {macro} " in header for macro in required)


def test_values_of_a_file_and_of_its_command_reach_the_commands_settings(parse):
    _, *words = read_header(CONFIGS / "runs" / "eval.gin").command
    parse(*words, "--gin.GAMMA=6")
    args = _parser().parse_args(["evaluate", "--draft", "bigram"])
    models = gin.get_configurable("Models")(**settings.given(args, settings.Models))
    options = build("GenerateOptions")
    assert models.target == "gs://my-bucket/t5_1_1_xxl_ende/checkpoint_1020000"
    # A flag, a binding and a value of the file.
    assert (models.draft_name(), options.gamma, options.batch_size) == ("bigram", 6, 8)


@pytest.mark.parametrize("name", ["t5_1_0_small", "t5_1_1_xxl", "byt5_large"])
def test_a_size_is_bound_by_its_name_and_single_values_override_it(name, parse):
    flags = ("DATA_DIR=x", "OUTPUT_DIR=x", f"MODEL_SIZE={name}", "T5Config.vocab_size=8000")
    parse("train", "--gin_file=gin_configs/runs/train.gin", *(f"--gin.{flag}" for flag in flags))
    assert build("T5Config") == dataclasses.replace(size(name), vocab_size=8000)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("size=t5_1_1_tiny", "size is 't5_1_1_tiny'"),
        ("embed_dim=3", "unknown T5 setting 'embed_dim'"),
    ],
)
def test_sizes_that_do_not_exist_are_refused(binding, message, parse):
    path = "gin_configs/models/t5_draft.gin"
    parse("train", f"--gin_file={path}", f"--gin.T5Config.{binding}")
    with pytest.raises(InputError, match=message):
        build("T5Config")


@pytest.mark.parametrize(("name", "millions"), [("gpt_97m", 97), ("gpt_6m", 6)])
def test_the_papers_language_models_have_the_papers_numbers_of_parameters(name, millions, parse):
    parse("train-lm", f"--gin_file=gin_configs/models/{name}.gin")
    shapes = abstract_params(build("GPTConfig"))
    assert round(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6) == millions


TABLE_2 = CONFIGS / "experiments" / "table2.gin"
TASKS = {"wmt_t2t_ende_v003": "EnDe", "cnn_dailymail_v002": "CNN/DM"}


def test_the_header_of_table_2_has_the_papers_rows_and_binds_them_to_the_benchmark(parse):
    lines = re.findall(r"^#   ((?:wmt|cnn)_\w+ .*)", TABLE_2.read_text("utf-8"), re.MULTILINE)
    kinds = (str, str, *6 * (float,))
    _, *words = read_header(TABLE_2).command
    for line, row in zip(lines, paper_tables.TABLE_2, strict=True):
        task, *values = (kind(word) for kind, word in zip(kinds, line.split(), strict=True))
        assert (TASKS[task], *values) == dataclasses.astuple(row)
        chosen = {"TEMPERATURE": row.temperature, "GAMMA": row.gamma, "MIXTURE_OR_TASK_NAME": task}
        gin.clear_config()
        parse(*words, *(f"--gin.{name}={value}" for name, value in chosen.items()))
        options, decoding = build("BenchmarkOptions"), build("GenerateOptions")
        assert gin.query_parameter("%MIXTURE_OR_TASK_NAME") == task
        assert (options.temperatures, options.gammas) == ((row.temperature,), (row.gamma,))
        assert (decoding.verifier, decoding.batch_size) == ("token", 1)
