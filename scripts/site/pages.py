"""MkDocs hook: gives the site the repository's layout, and a page for each package's API.

Relative links work in the site as in the repository, without copies of documents: README is the
front page, and files outside of ``docs`` that pages link to are part of the site.
"""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "spec_t5x"
# Packages and modules with a page, most imported first.
AREAS = (
    *("generation", "checkpoints", "drafts", "verifiers", "inference", "data"),
    *("tuning", "sampling", "interfaces", "loops", "beams", "models", "t5x_plugin"),
    *("labs", "contrib", "registry", "machine", "options", "errors", "names", "types"),
)
# Packages without a page: the command line, which --help documents (mkdocs.yml omits that of labs).
LEFT_OUT = ("cli", "infer")
# Wider than the theme's default, for code of 100 columns and wide tables.
WIDE = """\
.md-grid { max-width: 75rem; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: .4em .8em; }
"""
INDEX_OPTIONS = "{heading_level: 2, show_submodules: false}"


def page_of(area: str) -> str:
    """Returns the path of the API page of a package or module, relative to the site."""
    return f"api/{area}.md"


def units() -> set[str]:
    """Returns the names of all packages and modules directly in ``spec_t5x``."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return folders | {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def linked(document: Path) -> set[str]:
    """Returns the existing files that a document links to, as paths in the repository."""
    found = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    paths = [(document.parent / link).resolve() for link in found if "://" not in link]
    return {str(path.relative_to(REPOSITORY)) for path in paths if path.is_file()}


def on_config(config):
    """Returns the configuration with the API's pages at the end of the navigation.

    Raises:
      ValueError: ``AREAS`` and ``LEFT_OUT`` are not exactly the packages of ``spec_t5x``.
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
    """Returns assets, all linked documents at their repository paths, and the API's pages."""
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
