"""MkDocs' hook: the site has the repository's layout, and a page for each package's API.

Relative links lead to the same places here and in the repository, so no document has a second
copy: README is the front page, and what pages link to outside of ``docs`` comes with them.
"""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "spec_t5x"
# Packages and modules, those first that programs import most.
AREAS = (
    *("generation", "checkpoints", "drafts", "verifiers", "inference", "data"),
    *("tuning", "theory", "sampling", "interfaces", "loops", "beams", "models", "t5x_plugin"),
    *("labs", "contrib", "testing", "registry", "machine", "options", "errors", "names", "types"),
)
# The command line; its help is its manual.
LEFT_OUT = ("cli", "infer")
# Lines of code have up to 100 columns, and tables many.
WIDE = """\
.md-grid { max-width: 75rem; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: .4em .8em; }
"""
INDEX_OPTIONS = "{heading_level: 2, show_submodules: false}"


def page_of(area: str) -> str:
    """Returns the place of a package's page in the site."""
    return f"api/{area}.md"


def units() -> set[str]:
    """Returns the packages and modules right under ``spec_t5x``."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return folders | {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def linked(document: Path) -> set[str]:
    """Returns what a document links to in the repository, as paths below it."""
    found = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    paths = [(document.parent / link).resolve() for link in found if "://" not in link]
    return {str(path.relative_to(REPOSITORY)) for path in paths if path.is_file()}


def on_config(config):
    """Puts the pages of the API at the end of the navigation.

    Raises:
      ValueError: a package is in neither ``AREAS`` nor ``LEFT_OUT``.
    """
    if unknown := units() ^ {*AREAS, *LEFT_OUT}:
        raise ValueError(f"AREAS and LEFT_OUT of {__file__} differ from spec_t5x in {unknown}")
    pages = [{f"spec_t5x.{area}": page_of(area)} for area in AREAS]
    config.nav.append({"API": ["api/index.md", *pages]})
    return config


def summary(area: str) -> str:
    """Returns the first line of a package's or a module's docstring."""
    path = PACKAGE / area / "__init__.py"
    path = path if path.exists() else path.parent.with_suffix(".py")
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]


def on_files(files, config):
    """Lays the pages out as the repository has them, and adds those of the API."""
    wanted = {"README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())}
    found = set()
    while wanted - found:
        name = min(wanted - found)
        found.add(name)
        if name.endswith(".md"):
            wanted |= linked(REPOSITORY / name)
    areas = "\n".join(f"- [`{area}`]({area}.md): {summary(area)}" for area in AREAS)
    texts = {page_of(area): f"::: spec_t5x.{area}\n" for area in AREAS} | {
        page_of("index"): f"# API\n\n{areas}\n\n::: spec_t5x\n    options: {INDEX_OPTIONS}\n",
        "assets/wide.css": WIDE,
    }
    return Files(
        [
            *(file for file in files if file.src_uri.startswith("assets/")),
            *(
                File.generated(config, name, abs_src_path=str(REPOSITORY / name))
                for name in sorted(found)
            ),
            *(File.generated(config, name, content=text) for name, text in texts.items()),
        ]
    )
