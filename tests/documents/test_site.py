"""The site of the documentation: built without a warning, whole, and loading nothing else."""

import ast
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.child import REPOSITORY, finished

PACKAGE = REPOSITORY / "spec_t5x"
# The command line.
LEFT_OUT = ("cli", "infer")


class Page(HTMLParser):
    """Anchors of a page, targets of its links, and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            self.anchors.add(attrs["id"])
        if tag == "a" and "href" in attrs:
            self.links.add(attrs["href"])
        elif "src" in attrs or "href" in attrs:
            self.loaded.add(attrs.get("src") or attrs["href"])


def build(site: Path, folder: Path = REPOSITORY) -> str:
    """Builds the site as ``scripts/docs.sh`` does; returns warnings and the exit status."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", site]
    result = finished(*command, cwd=folder, NO_MKDOCS_2_WARNING="1")
    # With --quiet, --strict lets warnings pass.
    lines = (line for line in result.stderr.splitlines() if not line.startswith("INFO "))
    return "\n".join([*lines, f"exit status {result.returncode}"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert build(folder) == "exit status 0"
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    # The page for missing pages has absolute links.
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_public_name_is_on_an_api_page(pages):
    described = set().union(*(page.anchors for path, page in pages.items() if "api" in path.parts))
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        if parts[1] in LEFT_OUT or parts[1:3] == ("labs", "commands"):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        names = [f"{module}.{node.name}" for node in defined if not node.name.startswith("_")]
        missing += sorted({module, *names} - described)
    assert missing == []


def test_fields_arguments_and_exceptions_are_described(site):
    page = (site / "api" / "options.html").read_text(encoding="utf-8")
    # The help of an option, and a comment above a field.
    assert "outputs for each input" in page and "Pairs (ids, bias)" in page
    page = (site / "api" / "generation.html").read_text(encoding="utf-8")
    assert "Raises:" in page and "a checkpoint that cannot be found" in page
    # Arguments with one description.
    page = (site / "api" / "tuning.html").read_text(encoding="utf-8")
    assert page.count("as in decoding (") >= 2


def test_no_link_is_dead(site, pages):
    dead, seen = [], 0
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(unquote(link))
            if "://" in target:
                continue
            found = (path.parent / target).resolve() if target else path
            seen += 1
            if not found.exists() or (
                anchor and found in pages and anchor not in pages[found].anchors
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    assert seen > 1000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loaded = set().union(*(page.loaded for page in pages.values()))
    assert "assets/wide.css" in loaded
    assert [each for each in loaded if "://" in each or each.startswith("//")] == []
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8"), style


def test_dead_links_are_found(tmp_path):
    warnings = {
        "[here](nowhere.md)": "link 'nowhere.md', but the target is not found",
        "[here](#nowhere)": "there is no such anchor",
        "[here](/absolute.md)": "absolute link '/absolute.md'",
    }
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Title\n\n" + "\n\n".join(warnings))
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {REPOSITORY / 'mkdocs.yml'}\nhooks: []\nplugins: []\nnav: [index.md]\n"
    )
    found = build(tmp_path / "site", tmp_path)
    assert [warning for warning in warnings.values() if warning not in found] == []
    assert found.endswith("exit status 1")
