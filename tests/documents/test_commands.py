"""Commands, scripts and links of README, docs and cards of models exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.cli import main

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "spec_t5x"
DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "examples").rglob("README.md")),
    *sorted(PACKAGED_MODELS.glob("*/README.md")),
]


def name_of(document: Path) -> str:
    return str(document.relative_to(REPOSITORY)).removeprefix("spec_t5x/pretrained/")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yields every command of every shell block: the document, and its words."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                # The reader fills in "…".
                for part in line.replace(" …", "").split("; "):
                    if words := shlex.split(part, comments=True):
                        yield name_of(document), words


COMMANDS = list(commands())
# The package's commands; T5X's programs and scripts take gin files of the same kind.
OURS = [(where, words[1:]) for where, words in COMMANDS if words[0] == "spec-t5x"]
GIN = [
    (where, words)
    for where, words in COMMANDS
    if words[0] != "spec-t5x" and any("gin" in word for word in words)
]


@pytest.mark.parametrize(("where", "words"), OURS)
def test_a_command_is_known_and_so_are_its_flags(where, words, parse):
    given = [word for word in words if not word.startswith("--gin.")]
    args, rest = main._parser().parse_known_args(given)
    assert rest == []
    if getattr(args, "gin_file", None):
        # Unknown macros and those that are not bound are errors.
        parse(*words)


def text_with_includes(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    for included in re.findall(r"^include ['\"](.*?)['\"]", text, re.MULTILINE):
        found = [folder / included for folder in (REPOSITORY, path.parent)]
        text += "".join(text_with_includes(each) for each in found if each.is_file())
    return text


@pytest.mark.parametrize(("where", "words"), GIN)
def test_gin_files_exist_and_have_the_macros_that_are_set(where, words):
    files = re.findall(r"gin_configs/\S+?\.gin", " ".join(words))
    for file in files:
        assert (REPOSITORY / file).is_file(), f"there is no {file}"
    text = "".join(text_with_includes(REPOSITORY / file) for file in files)
    for macro in re.findall(r"--gin\.([A-Z_0-9]+)=", " ".join(words)):
        assert re.search(rf"\b{macro}\b", text), f"{macro} is in none of {files}"


def test_scripts_exist():
    scripts = {word for _, words in COMMANDS for word in words if word.startswith("scripts/")}
    assert [script for script in scripts if not (REPOSITORY / script).is_file()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (document.parent / link).exists(), f"{document.name} links to {link}"
    for path in re.findall(r"`((?:gin_configs|benchmarks|scripts|tests)/[\w./]+\.\w+)`", text):
        # The reader fills in NAME.
        found = (REPOSITORY / path).exists() or "NAME" in path
        assert found, f"{document.name} names {path}"
    if document.parent.name == "docs":
        rooms = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
        for path in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text):
            assert (PACKAGE / path).is_file(), f"{document.name} names {path}"
