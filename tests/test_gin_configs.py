"""Every gin file names its macros and its command, and binds what exists."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import gin
import pytest

from spec_t5x.cli import settings
from spec_t5x.cli.main import _parser
from spec_t5x.cli.settings import Models
from spec_t5x.experiments.benchmark import BenchmarkOptions
from spec_t5x.generation import GenerateOptions
from spec_t5x.gin_files import parse_gin
from spec_t5x.models.t5 import T5Config
from spec_t5x.training.run import DataOptions, OptimizerOptions
from spec_t5x.training.run_heads import train_heads  # noqa: F401, registered by the import
from spec_t5x.training.trainer import TrainOptions

REPOSITORY = Path(__file__).parents[1]
FILES = sorted((REPOSITORY / "gin_configs").rglob("*.gin"))
NAMES = [str(path.relative_to(REPOSITORY)) for path in FILES]

# The classes whose parameters a file may bind.
CLASSES = (
    T5Config,
    DataOptions,
    OptimizerOptions,
    TrainOptions,
    Models,
    GenerateOptions,
    BenchmarkOptions,
)
# What trains, and the arguments that a file binds to one of them.
OF_EVERY_TRAINING = {
    "data": DataOptions,
    "optimizer": OptimizerOptions,
    "options": TrainOptions,
}
TRAININGS = {
    "train": {"model": T5Config, **OF_EVERY_TRAINING},
    "train_heads": OF_EVERY_TRAINING,
}


class Header(NamedTuple):
    """What the comment at the top of a gin file says."""

    macros: list[str]
    # The command, as a shell splits it.
    command: list[str]


def read_header(path: Path) -> Header:
    """Parses the header.

    Raises:
      ValueError: it lacks the macros or the command.
    """
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    lines = [line[1:] for line in comment.group().splitlines()] if comment else []
    (start,) = [n for n, line in enumerate(lines) if line.startswith(" Required macros:")]
    (first,) = [n for n, line in enumerate(lines) if line.startswith("   spec-t5x ")]
    macros = [line.split()[0] for line in lines[start + 1 : first] if line.strip()]
    if not macros and not lines[start].endswith("none."):
        raise ValueError(f"{path}: name the macros, or write 'none.'")
    command = " ".join(line.strip().removesuffix("\\") for line in lines[first:])
    return Header(macros, shlex.split(command))


@pytest.fixture(autouse=True)
def no_bindings():
    """The commands' classes registered, and nothing bound to them."""
    args = _parser().parse_args(["generate"])
    args.gin_bindings = []
    settings.read(args)
    gin.external_configurable(BenchmarkOptions, module="spec_t5x")
    gin.clear_config()
    yield
    gin.clear_config()


def bind(path: Path) -> None:
    """Parses a file with a dummy for each macro that its header lists."""
    flags = [f"--gin.{macro}='dummy_{macro}'" for macro in read_header(path).macros]
    parse_gin([str(path)], flags)


def test_there_are_gin_files():
    assert len(FILES) >= 3


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_header_lists_just_the_macros_that_the_file_leaves_open(path):
    code = re.sub("#.*", "", path.read_text(encoding="utf-8"))
    used = set(re.findall(r"%(\w+)", code))
    bound = set(re.findall(r"^(\w+) *=", code, re.MULTILINE))
    assert sorted(read_header(path).macros) == sorted(used - bound)
    assert bound <= used


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_header_gives_a_command_that_names_the_file_and_binds_its_macros(path):
    header = read_header(path)
    assert header.command[0] == "spec-t5x"
    assert f"--gin_file={path.relative_to(REPOSITORY)}" in header.command
    flags = [word for word in header.command if word.startswith("--gin.")]
    named = {flag.removeprefix("--gin.").split("=")[0] for flag in flags}
    assert set(header.macros) <= named
    # The flags exist, and gin takes the bindings.
    args, rest = _parser().parse_known_args(header.command[1:])
    assert rest == flags
    assert args.gin_file == [str(path.relative_to(REPOSITORY))]
    parse_gin([str(path)], flags)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_bindings_are_of_configurables_that_can_be_built(path):
    bind(path)
    code = path.read_text(encoding="utf-8")
    names = set(re.findall(r"^([\w.]+)\.\w+ *=", code, re.MULTILINE))
    known = {cls.__name__: cls for cls in CLASSES}
    assert names
    assert names - set(TRAININGS) <= set(known)
    for name in names - set(TRAININGS):
        assert isinstance(gin.get_configurable(name)(), known[name])
    for training in names & set(TRAININGS):
        check_training(training)


def check_training(name):
    """What the file binds are the arguments of the training, and they go together."""
    built = {}
    for argument, cls in TRAININGS[name].items():
        reference = gin.query_parameter(f"{name}.{argument}")
        assert repr(reference) == f"@{cls.__name__}()"
        built[argument] = gin.get_configurable(cls.__name__)()
    assert gin.query_parameter(f"{name}.output_dir") is not None
    built["optimizer"].build(built["options"].steps)
    data = built["data"]
    assert max(data.buckets) >= max(data.max_source_length, data.max_target_length)
    assert max(data.source_column, data.target_column) < data.num_columns


def test_values_of_a_file_reach_the_commands_settings():
    path = REPOSITORY / "gin_configs" / "runs" / "generate_ende.gin"
    header = read_header(path)
    args, rest = _parser().parse_known_args(header.command[1:])
    args.gin_file, args.gin_bindings = [str(path)], rest
    models, options = settings.read(args)
    assert (models.target, models.draft_name()) == ("ende-target", "ende-draft")
    # The command's own binding and the file's value.
    assert (options.gamma, options.max_decode_len) == (6, 128)
