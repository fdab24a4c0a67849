"""Imports point one way, and importing the package stays light."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.child import REPOSITORY, printed

# Modules and packages of the core, from the ground up. Each may import those of the lines above
# its own, and its own modules.
CORE = (
    ("__init__", "errors", "names", "types"),
    ("registry",),
    ("machine",),
    ("sampling",),
    ("interfaces",),
    ("verifiers",),
    ("options",),
    # They see Protocols only.
    ("loops",),
    ("beams",),
    ("models",),
    ("drafts",),
    ("data",),
    ("checkpoints",),
    ("tuning",),
    # Text in, text out.
    ("generation",),
    ("inference",),
    ("t5x_plugin",),
)
# What trains and measures.
LABS = (
    (
        "labs",
        "labs.list_options",
        "labs.estimates",
        "labs.metrics",
        "labs.requirements",
        "labs.testing",
        "labs.text_pairs",
        "labs.theory",
        "labs.writing",
    ),
    ("labs.local_tasks", "labs.task_scores"),
    ("labs.training", "labs.benchmark"),
    ("labs.tpu", "labs.t5x_training"),
    ("labs.reproduction",),
    # A page for its command and notebooks.
    ("labs.demo",),
)
# What hangs on the core's seams, each folder by itself; it may import core and labs.
CONTRIB = (("contrib",),)
# Nothing else imports commands. ``python -m spec_t5x.infer`` is one under another name.
COMMANDS = (("cli",), ("infer",), ("labs.commands",))
LAYERS = (*CORE, *LABS, *CONTRIB, *COMMANDS)

# Packages whose own packages have layers. The core, commands included, imports nothing of them,
# and labs nothing of contrib.
RINGS = ("labs", "contrib")
# What names modules of labs by their addresses: the commands, flags of generate, and the paper's
# tasks, whose metrics measure.
NAMES_LABS = {"cli/main.py", "cli/generate.py", "data/paper_tasks.py"}
# Lines of the core.
MOST_LINES = 22_060
# Who may import what is slow to import or of one host's making.
HEAVY = ("seqio", "tensorflow", "t5x")
# Extras bring them: a Generator does without.
EXTRAS = (*HEAVY, "clu", "jinja2", "matplotlib", "optax", "orbax", "rouge_score", "sacrebleu")
MAY_USE_GIN = ("data", "inference", "t5x_plugin", "labs", "contrib", "cli")
MAY_BE_HEAVY = ("checkpoints", *MAY_USE_GIN)


def unit_of(parts: Sequence[str]) -> str:
    """Returns the unit of a layer that a module belongs to, by the parts of its name."""
    inner = [part for part in parts[1:2] if part != "__init__" and parts[0] in RINGS]
    return ".".join([parts[0], *inner])


def ring_of(unit: str) -> int:
    """Returns the number of a unit's ring: 0 for the core, then those of ``RINGS``."""
    name = unit.split(".")[0]
    return RINGS.index(name) + 1 if name in RINGS else 0


def module_of(path: Path) -> tuple[str, ...]:
    """Returns the parts of a module's name under ``spec_t5x``."""
    return path.with_suffix("").parts


def imports(source: str) -> Iterator[str]:
    """Yields every module that a source imports, in functions too, as absolute names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            # "from spec_t5x import verifiers" names a module, too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers_of(package: Path) -> dict[str, int]:
    """Returns the layer of each unit; the folders of ``contrib`` share one."""
    layer_of = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
    folders = (path.name for path in (package / "contrib").glob("*/"))
    return {f"contrib.{name}": layer_of["contrib"] for name in folders} | layer_of


def wrong_imports(package: Path) -> list[str]:
    """Returns each break of the rules in ``package`` as "file imports module"."""
    layer_of = layers_of(package)
    wrong = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        importer = unit_of(module_of(relative))
        for name in imports(path.read_text(encoding="utf-8")):
            root, *inner = name.split(".")
            allowed = True
            if root == "spec_t5x":
                imported = unit_of(inner or ["__init__"])
                below = layer_of[imported] < layer_of[importer]
                inward = ring_of(imported) <= ring_of(importer)
                allowed = inward and (below or imported == importer)
            elif root in HEAVY:
                allowed = importer.split(".")[0] in MAY_BE_HEAVY
            elif root == "gin":
                allowed = importer.split(".")[0] in MAY_USE_GIN
            if not allowed:
                wrong.append(f"{relative} imports {name}")
    return wrong


def test_every_module_has_its_layer():
    package = REPOSITORY / "spec_t5x"
    units = {unit_of(module_of(path.relative_to(package))) for path in package.rglob("*.py")}
    assert units <= layers_of(package).keys()


def test_imports_point_one_way():
    assert wrong_imports(REPOSITORY / "spec_t5x") == []


def in_circles(package: Path) -> list[str]:
    """Returns modules whose imports form a circle; those in functions count, except in ``main``."""
    paths = {(package.name, *module_of(p.relative_to(package))): p for p in package.rglob("*.py")}
    known = {".".join(parts).removesuffix(".__init__"): path for parts, path in paths.items()}
    waiting = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # A module's program may import what imports the module.
        tree.body = [node for node in tree.body if getattr(node, "name", None) != "main"]
        names = set(imports(ast.unparse(tree)))
        parents = {name.rpartition(".")[0] for name in names - known.keys()}
        waiting[module] = (names | parents) & known.keys() - {module}

    def are_free() -> set[str]:
        imported = set().union(*waiting.values())
        return {m for m, names in waiting.items() if m not in imported or not names & {*waiting}}

    while free := are_free():
        waiting = {module: names for module, names in waiting.items() if module not in free}
    return sorted(waiting)


def test_no_modules_import_one_another():
    assert in_circles(REPOSITORY / "spec_t5x") == []


def test_a_circle_of_imports_is_found(tmp_path):
    package = tmp_path / "spec_t5x"
    package.mkdir()
    (package / "one.py").write_text("def f():\n    from spec_t5x.two import g\n")
    (package / "two.py").write_text("from spec_t5x import one\n\n\ndef g():\n    one.f()\n")
    (package / "three.py").write_text("from spec_t5x.one import f\n\n\ndef main():\n    f()\n")
    assert in_circles(package) == ["spec_t5x.one", "spec_t5x.two"]


def test_the_core_names_labs_in_few_commands_alone():
    """A module that is named by its address is imported at run time, if it is there."""
    package, naming = REPOSITORY / "spec_t5x", set()
    for path in package.rglob("*.py"):
        if ring_of(unit_of(module_of(path.relative_to(package)))):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = (node for node in nodes if isinstance(node, ast.Constant))
        if any("labs." in str(t.value) for t in texts if id(t) not in statements):
            naming.add(path.relative_to(package).as_posix())
    assert naming == NAMES_LABS


def test_the_core_does_not_grow():
    """A new line replaces an old one, or belongs to another ring."""
    package = REPOSITORY / "spec_t5x"
    outside = [package / ring for ring in RINGS]
    core = [path for path in package.rglob("*.py") if not any(map(path.is_relative_to, outside))]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core) <= MOST_LINES


def test_kernels_are_named_in_contrib_alone():
    package = REPOSITORY / "spec_t5x"
    core = [path for path in package.rglob("*.py") if package / "contrib" not in path.parents]
    words = re.compile(r"\bin_use\b|ffi_call|intercept_methods\(|Panels|spec_t5x\.contrib\.cpu")
    assert [path for path in core if words.search(path.read_text(encoding="utf-8"))] == []


def test_only_tests_of_contrib_and_of_benchmarks_import_contrib():
    """The others run if its folders are deleted."""
    tests = REPOSITORY / "tests"
    may = tests / "contrib", tests / "benchmarks"
    found = {
        path.name: name
        for path in tests.rglob("*.py")
        if not any(map(path.is_relative_to, may))
        for name in imports(path.read_text(encoding="utf-8"))
        if name.startswith(("spec_t5x.contrib", "tests.contrib"))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("loops/speculative.py", "from spec_t5x.models.t5 import Transformer"),
        ("loops/speculative.py", "from spec_t5x import drafts"),
        ("loops/autoregressive.py", "import spec_t5x.checkpoints.loading"),
        ("sampling/verification.py", "from spec_t5x.loops.speculative import step"),
        ("sampling/distributions.py", "from spec_t5x.interfaces import Target"),
        ("models/t5.py", "def f():\n    from spec_t5x.checkpoints import native"),
        ("models/t5.py", "from spec_t5x.drafts import transformer"),
        ("labs/training/run_train.py", "from spec_t5x.cli.main import main"),
        ("labs/training/run_train.py", "from spec_t5x.labs.tpu import chips"),
        ("t5x_plugin/drafts.py", "from spec_t5x.labs.training.distill import Learner"),
        ("generation/generator.py", "from spec_t5x import labs"),
        ("cli/main.py", "from spec_t5x.labs.commands import demo"),
        ("cli/main.py", "from spec_t5x.contrib.one import network"),
        ("labs/training/run_train.py", "from spec_t5x.labs.commands import train"),
        ("models/t5.py", "from spec_t5x.contrib.one import network"),
        ("labs/training/run_train.py", "from spec_t5x.contrib.one import network"),
        ("contrib/one/network.py", "from spec_t5x.contrib.other import network"),
        ("contrib/one/network.py", "from spec_t5x.cli.main import main"),
        ("contrib/one/network.py", "from spec_t5x.labs.commands import train"),
        ("models/t5.py", "import tensorflow as tf"),
        ("loops/speculative.py", "from t5x import decoding"),
        ("generation/generator.py", "import seqio"),
        ("loops/speculative.py", "import gin"),
    ],
)
def test_an_import_against_the_direction_is_found(tmp_path, file, line):
    path = tmp_path / file
    for folder in ("one", "other"):
        (tmp_path / "contrib" / folder).mkdir(parents=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"from spec_t5x.types import Array\n{line}\n")
    (wrong,) = wrong_imports(tmp_path)
    assert wrong.startswith(f"{file} imports ")


@pytest.fixture(scope="module")
def loaded_after() -> dict[str, list[str]]:
    """Returns the extras in ``sys.modules`` after each import, in a fresh process."""
    program = (
        "import importlib, json, sys\n"
        "loaded = {}\n"
        "for name in sys.argv[1].split():\n"
        "    importlib.import_module(name)\n"
        "    loaded[name] = [h for h in sys.argv[2].split() if h in sys.modules]\n"
        "print(json.dumps(loaded))\n"
    )
    names = "spec_t5x spec_t5x.loops.speculative spec_t5x.generation spec_t5x.cli.main"
    return json.loads(printed("-c", program, names, " ".join([*EXTRAS, "jax"])))


@pytest.mark.parametrize(
    "name", ["spec_t5x", "spec_t5x.loops.speculative", "spec_t5x.generation", "spec_t5x.cli.main"]
)
def test_importing_leaves_the_packages_of_extras_alone(loaded_after, name):
    assert set(loaded_after[name]) <= {"jax"}


def test_the_loops_need_jax_and_the_package_itself_nothing(loaded_after):
    assert loaded_after["spec_t5x"] == []
    assert loaded_after["spec_t5x.loops.speculative"] == ["jax"]
