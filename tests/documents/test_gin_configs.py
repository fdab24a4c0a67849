"""Every gin file names its macros and its command, and binds what exists."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import gin
import jax
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.cli import settings
from spec_t5x.cli.gin_files import parse_gin, read_all
from spec_t5x.cli.main import _parser
from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.experiments.acceptance import AcceptanceOptions
from spec_t5x.experiments.acceptance_run import AcceptanceRun
from spec_t5x.experiments.benchmark import BenchmarkOptions
from spec_t5x.experiments.evaluation import EvaluationOptions
from spec_t5x.experiments.growth import GrowthOptions
from spec_t5x.experiments.neighbours.options import NeighboursOptions
from spec_t5x.experiments.objectives import ObjectivesOptions
from spec_t5x.experiments.overhead import OverheadOptions
from spec_t5x.experiments.pacing import PacingOptions
from spec_t5x.experiments.reproduction.contents import ReproduceOptions
from spec_t5x.experiments.synthetic_acceptance import SyntheticOptions
from spec_t5x.generation import GenerateOptions
from spec_t5x.inference.options import InferOptions
from spec_t5x.models.gpt import GPTConfig, abstract_variables
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import SIZES
from spec_t5x.models.t5 import T5Config
from spec_t5x.training.distill import DistillOptions
from spec_t5x.training.run import OptimizerOptions
from spec_t5x.training.run_data import DataOptions, TaskDataOptions
from spec_t5x.training.run_distill import KeptLayers
from spec_t5x.training.run_heads import train_heads  # noqa: F401, registered by the import
from spec_t5x.training.run_lm import TextOptions
from spec_t5x.training.text_metrics import MetricsOptions
from spec_t5x.training.trainer import TrainOptions

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "gin_configs"
FILES = [
    path
    for path in sorted(CONFIGS.rglob("*.gin"))
    # T5X's own programs run these; tests/t5x_plugin parses and binds them with T5X.
    if not path.name.startswith("t5x_") and path.parent.name != "t5x"
]


OF_T5X = sorted(set(CONFIGS.rglob("*.gin")) - set(FILES))


def is_part(path: Path) -> bool:
    """Whether other files include this one, and no command runs it by itself."""
    return path.parent.name in ("models", "data") or path.name == "common.gin"


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(REPOSITORY)) for path in paths]


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=ids(paths))


PARTS = [path for path in FILES if is_part(path)]
RUNS = [path for path in FILES if not is_part(path)]
MODELS = [
    path for path in PARTS if path.parent.name == "models" and not path.name.startswith("gpt_")
]
DRAFTS = [path for path in RUNS if path.parent.name == "drafts"]

# The classes whose parameters a file may bind; those of a command of its own, too.
CLASSES = (
    T5Config,
    GPTConfig,
    DataOptions,
    TaskDataOptions,
    MetricsOptions,
    TextOptions,
    OptimizerOptions,
    TrainOptions,
    DistillOptions,
    KeptLayers,
    Models,
    GenerateOptions,
    BenchmarkOptions,
    GrowthOptions,
    PacingOptions,
    NeighboursOptions,
    ObjectivesOptions,
    OverheadOptions,
    EvaluationOptions,
    InferOptions,
    SyntheticOptions,
    ReproduceOptions,
    AcceptanceRun,
    AcceptanceOptions,
)
# What trains, and the arguments that a file binds to one of them.
OF_EVERY_TRAINING = {
    "data": DataOptions,
    "optimizer": OptimizerOptions,
    "options": TrainOptions,
}
TRAININGS = {
    "train": {"model": T5Config, **OF_EVERY_TRAINING},
    "distill": {"layers": KeptLayers, "distillation": DistillOptions, **OF_EVERY_TRAINING},
    "train_heads": OF_EVERY_TRAINING,
    "train_lm": {"model": GPTConfig, **OF_EVERY_TRAINING, "data": TextOptions},
}


class Header(NamedTuple):
    """What the comment at the top of a gin file says."""

    text: str
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
    # Explanations that go on are further to the right.
    macros = re.findall(r"^   (\w+)", "\n".join(lines[start + 1 : first]), re.MULTILINE)
    if not macros and not lines[start].endswith("none."):
        raise ValueError(f"{path}: name the macros, or write 'none.'")
    command = " ".join(line.strip().removesuffix("\\") for line in lines[first:])
    return Header("\n".join(lines), macros, shlex.split(command))


def code_of(path: Path) -> str:
    """The bindings of a file and of all that it includes, without comments."""
    return "\n".join(re.sub("#.*", "", text) for _, text in read_all([str(path)]))


def bound_names(code: str) -> set[str]:
    """The configurables that some code binds parameters of."""
    return set(re.findall(r"^([\w.]+)\.\w+ *=", code, re.MULTILINE))


@pytest.fixture(autouse=True)
def no_bindings(monkeypatch):
    """The commands' classes registered, nothing bound to them, paths as in the headers."""
    monkeypatch.chdir(REPOSITORY)
    args = _parser().parse_args(["generate"])
    args.gin_bindings = []
    settings.read(args)
    for subject in (
        BenchmarkOptions,
        GrowthOptions,
        PacingOptions,
        NeighboursOptions,
        ObjectivesOptions,
        OverheadOptions,
    ):
        gin.external_configurable(subject, module="spec_t5x")
    gin.external_configurable(SyntheticOptions, module="spec_t5x")
    gin.external_configurable(ReproduceOptions, module="spec_t5x")
    gin.external_configurable(AcceptanceRun, module="spec_t5x")
    gin.external_configurable(AcceptanceOptions, module="spec_t5x")
    gin.clear_config()
    yield
    gin.clear_config()


def bind(path: Path) -> None:
    """Parses a file with its command's flags, and a dummy for each macro that its header lists."""
    header = read_header(path)
    flags = [word for word in header.command if word.startswith("--gin.")]
    flags += [f"--gin.{macro}='dummy_{macro}'" for macro in header.macros]
    parse_gin([str(path)], flags)


def build(name: str):
    """The object that a file's bindings make of a class."""
    known = {cls.__name__: cls for cls in CLASSES}
    built = gin.get_configurable(name)()
    assert isinstance(built, known[name])
    return built


def test_there_are_gin_files():
    assert len(RUNS) >= 3
    assert PARTS and MODELS and DRAFTS


@each(RUNS)
def test_header_lists_just_the_macros_that_the_file_leaves_open(path):
    code = code_of(path)
    used = set(re.findall(r"%(\w+)", code)) - {"gin"}
    values = re.findall(r"^(\w+) *= *(.*)", code, re.MULTILINE)
    # In the order of parsing, so that the last one holds.
    bound = {name for name, value in dict(values).items() if value != "%gin.REQUIRED"}
    assert sorted(read_header(path).macros) == sorted(used - bound)
    assert bound <= used


@each(RUNS)
def test_header_gives_a_command_that_names_the_file_and_binds_its_macros(path):
    header = read_header(path)
    assert header.command[0] == "spec-t5x"
    flags = [word for word in header.command if word.startswith("--gin.")]
    named = {flag.removeprefix("--gin.").split("=")[0] for flag in flags}
    assert set(header.macros) <= named
    # The flags exist, and gin takes the bindings.
    words = [word for word in header.command[1:] if word not in flags]
    args, rest = _parser().parse_known_args(words)
    assert not rest
    assert args.gin_file[-1] == str(path.relative_to(REPOSITORY))
    parse_gin(args.gin_file, flags)


@each(RUNS)
def test_bindings_are_of_configurables_that_can_be_built(path):
    bind(path)
    names = bound_names(code_of(path))
    assert names
    for name in names - set(TRAININGS):
        build(name)
    for training in names & set(TRAININGS):
        check_training(training)


def check_training(name):
    """What the file binds are the arguments of the training, and they go together."""
    built = {}
    for argument, cls in TRAININGS[name].items():
        reference = gin.query_parameter(f"{name}.{argument}")
        if cls is DataOptions and repr(reference) == "@TaskDataOptions()":
            # In its place.
            cls = TaskDataOptions
        if cls is KeptLayers and reference is None:
            # A draft of its own sizes.
            argument, cls = "model", T5Config
            reference = gin.query_parameter(f"{name}.{argument}")
        assert repr(reference) == f"@{cls.__name__}()"
        built[argument] = gin.get_configurable(cls.__name__)()
    assert gin.query_parameter(f"{name}.output_dir") is not None
    built["optimizer"].build(built["options"].steps)
    data = built["data"]
    if isinstance(data, TextOptions):
        # The network has positions for the longest lines; the options check the rest.
        assert data.max_length <= built["model"].max_length
        return
    assert max(data.buckets) >= max(data.longest)
    if isinstance(data, DataOptions) and data.num_columns:
        assert max(data.source_column, data.target_column) < data.num_columns


@each(PARTS)
def test_a_part_says_what_it_is_and_can_be_built(path):
    assert path.read_text(encoding="utf-8").startswith("# ")
    users = [other for other in FILES if other != path and path in parts_of(other)]
    assert users or path.stem.startswith(("t5", "flan_t5", "mt5", "byt5", "gpt"))
    code = code_of(path)
    open_ = set(re.findall(r"%(\w+)", code)) - set(re.findall(r"^(\w+) *=", code, re.MULTILINE))
    parse_gin([str(path)], [f"--gin.{macro}='dummy'" for macro in open_])
    for name in bound_names(code) - {"DataOptions"}:
        build(name)


def parts_of(path: Path) -> set[Path]:
    """The file and all that it includes."""
    return {REPOSITORY / name for name, _ in read_all([str(path)])}


def test_values_of_a_file_reach_the_commands_settings():
    path = REPOSITORY / "gin_configs" / "runs" / "generate_ende.gin"
    header = read_header(path)
    args, rest = _parser().parse_known_args(header.command[1:])
    args.gin_file, args.gin_bindings = [str(path)], rest
    models, options = settings.read(args)
    assert (models.target, models.draft_name()) == ("ende-target", "ende-draft")
    # The command's own binding and the file's value.
    assert (options.gamma, options.max_decode_len) == (6, 128)


# --- sizes -------------------------------------------------------------------


def configured(path: Path) -> T5Config:
    gin.clear_config()
    parse_gin([str(path)], [])
    return gin.get_configurable("T5Config")()


def test_the_files_of_sizes_agree_with_the_packages():
    sizes = {path.stem: path for path in MODELS if path.stem in SIZES}
    assert sorted(sizes) == sorted(SIZES)
    for name, path in sizes.items():
        assert configured(path) == SIZES[name], name
    flan = [path for path in MODELS if path.stem.startswith("flan_t5")]
    assert len(flan) == 5
    for path in flan:
        assert configured(path) == SIZES[path.stem.replace("flan_t5", "t5_1_1")]


def test_one_file_binds_every_setting_and_the_others_hold_what_differs():
    def bindings(path):
        return re.findall(r"^T5Config\.(\w+) *=", path.read_text(encoding="utf-8"), re.MULTILINE)

    base = CONFIGS / "models" / "t5.gin"
    fields = [field.name for field in dataclasses.fields(T5Config)]
    assert sorted(bindings(base)) == sorted(fields)
    for path in MODELS:
        if path != base:
            (parent,) = re.findall(r'^include "(.*)"', path.read_text(), re.MULTILINE)
            ours, theirs = configured(path), configured(REPOSITORY / parent)
            differing = [name for name in fields if getattr(ours, name) != getattr(theirs, name)]
            assert sorted(bindings(path)) == sorted(differing), path


@pytest.mark.parametrize(("name", "millions"), [("gpt_97m", 97), ("gpt_6m", 6)])
def test_the_papers_language_models_have_the_papers_numbers_of_parameters(name, millions):
    parse_gin([str(CONFIGS / "models" / f"{name}.gin")], [])
    shapes = abstract_variables(gin.get_configurable("GPTConfig")())["params"]
    assert round(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6) == millions


# --- drafts ------------------------------------------------------------------


@pytest.fixture(scope="module")
def packaged():
    target = load("ende-target")
    return target, T5Model.create(target.params, target.config)


@each(DRAFTS)
def test_a_draft_of_each_kind_is_made_as_its_header_says(path, packaged):
    target, model = packaged
    command = read_header(path).command[1:]
    args, _ = _parser().parse_known_args([w for w in command if not w.startswith("--gin.")])
    args.gin_bindings = [word for word in command if word.startswith("--gin.")]
    models, _ = settings.read(args)
    make_draft(models.draft_name(), target, model, models.draft_options())


def test_there_is_a_file_for_each_kind_of_draft(packaged):
    with pytest.raises(InputError, match="one of transformer, unigram, .*") as refusal:
        make_draft("absent", *packaged)
    kinds = re.findall(r"\w+", str(refusal.value).rpartition("one of")[2])
    # And what is made of a transformer.
    assert {*kinds, "adaptive", "multi", "tree"} == {path.stem for path in DRAFTS}


def test_a_draft_can_be_given_to_any_run():
    draft = str(CONFIGS / "drafts" / "bigram.gin")
    for run in ("eval", "benchmark", "infer"):
        gin.clear_config()
        names = read_header(CONFIGS / "runs" / f"{run}.gin").macros
        flags = [f"--gin.{name}='x'" for name in names if name != "DRAFT_CHECKPOINT_PATH"]
        parse_gin([str(CONFIGS / "runs" / f"{run}.gin"), draft], flags)
        assert build("Models").draft_name() == "bigram"
        gin.clear_config()
        parse_gin(
            [str(CONFIGS / "runs" / f"{run}.gin"), draft],
            [*flags, "--gin.DRAFT_CHECKPOINT_PATH='tables'"],
        )
        assert build("Models").draft_name() == "bigram:tables"


# --- the paper's table 2 -----------------------------------------------------

# Task, draft, temperature, gamma, alpha, c, expected and measured speed-up.
TABLE_2 = (
    "ende small 0 7 0.75 0.02 3.2 3.4",
    "ende base 0 7 0.80 0.04 3.3 2.8",
    "ende large 0 7 0.82 0.11 2.5 1.7",
    "ende small 1 7 0.62 0.02 2.3 2.6",
    "ende base 1 5 0.68 0.04 2.4 2.4",
    "ende large 1 3 0.71 0.11 2.0 1.4",
    "cnndm small 0 5 0.65 0.02 2.4 3.1",
    "cnndm base 0 5 0.73 0.04 2.6 3.0",
    "cnndm large 0 3 0.74 0.11 2.0 2.2",
    "cnndm small 1 5 0.53 0.02 1.9 2.3",
    "cnndm base 1 3 0.55 0.04 1.8 2.2",
    "cnndm large 1 3 0.56 0.11 1.6 1.7",
)
TASKS = {"ende": "wmt_t2t_ende_v003", "cnndm": "cnn_dailymail_v002"}


def test_table_2_has_a_file_for_each_row():
    names = {"_".join(row.split()[:2]) + f"_t{row.split()[2]}" for row in TABLE_2}
    folder = CONFIGS / "experiments" / "table2"
    assert {path.stem for path in folder.glob("*.gin")} == {*names, "common"}


@pytest.mark.parametrize("row", TABLE_2)
def test_a_row_of_table_2_is_bound_to_the_benchmark(row):
    task, draft, temperature, gamma, alpha, c, expected, measured = row.split()
    path = CONFIGS / "experiments" / "table2" / f"{task}_{draft}_t{temperature}.gin"
    header = read_header(path)
    for text in (
        f"draft T5-{draft}, temperature {temperature}, gamma {gamma}.",
        f"alpha {alpha}, c {c}, speed-up {measured} measured ({expected} expected)",
        "one TPU-v4 chip, batch 1",
    ):
        assert text in header.text
    bind(path)
    options, decoding, models = (
        build(name) for name in ("BenchmarkOptions", "GenerateOptions", "Models")
    )
    assert options.mixture_or_task == TASKS[task]
    assert (options.temperatures, options.gammas) == ((float(temperature),), (int(gamma),))
    assert (options.pairs, decoding.verifier, decoding.batch_size) == (("draft/own",), "token", 1)
    assert (models.target, models.draft) == ("dummy_CHECKPOINT_PATH", "dummy_DRAFT_CHECKPOINT_PATH")


@each(OF_T5X)
def test_what_t5xs_programs_run_names_what_there_is(path):
    """As much as can be said of these files without T5X."""
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
