"""Docstrings begin with a verb or the thing itself, and prose uses the field's terms.

CONTRIBUTING.md states the rules. ``EXCEPTIONS`` lists what breaks them on purpose.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("spec_t5x", "tests", "benchmarks", "examples", "scripts")
    for path in (REPOSITORY / folder).rglob("*.py")
)
DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]

# No docstring begins with one of these, which make a fragment of it.
FRAGMENTS = re.compile(r"(?:Of|What|Where|Whether|None|Not|That|As|How|Which|Those|Who|Whose)\b")
# A class's, property's or module's does not begin with these either.
PREPOSITIONS = re.compile(
    r"(?:Its?|For|From|By|With|Like|To|In|When|While|If|So|On|At|Nothing|Here|Why|Until|Without)\b"
)
# A function's docstring begins with a verb in the third person.
VERB = re.compile(r"[A-Z][a-z-]+s\b")
# Words that another one says plainly, in docstrings, comments and documents.
CRYPTIC = re.compile(
    r"\b(?:nobody|whoever|sees? to it|(?:is|are) told|takes? part|knows? nothing"
    r"|of (?:its|their|one's|your) own|stands? (?:for|in|at|under|beside)|goes on)\b",
    re.IGNORECASE,
)
# Path and first words of a docstring, or path and cryptic words.
EXCEPTIONS: set[tuple[str, str]] = set()
MOST_EXCEPTIONS = 20
# Words of the documents, without the tables that scripts/tables.py writes.
MOST_WORDS = 15_000


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the kind of each documented thing, and its docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        kind = "thing"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            kind = "thing" if "property" in decorators else "function"
            kind = "test" if node.name.startswith("test_") else kind
        yield kind, text


def comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def broken(kind: str, text: str) -> bool:
    """Returns whether a docstring's first word breaks the rule for its kind."""
    if kind == "function":
        return not VERB.match(text)
    return bool(FRAGMENTS.match(text) or (kind == "thing" and PREPOSITIONS.match(text)))


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_docstrings_and_comments(path):
    source = path.read_text(encoding="utf-8")
    found = list(docstrings(ast.parse(source)))
    faults = {text.splitlines()[0] for kind, text in found if broken(kind, text)}
    for text in (*(text for _, text in found), *comments(source)):
        faults |= {match.group() for match in CRYPTIC.finditer(text)}
    assert faults <= {words for file, words in EXCEPTIONS if file == name_of(path)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documents(path):
    text = path.read_text(encoding="utf-8")
    allowed = {words for file, words in EXCEPTIONS if file == name_of(path)}
    assert {match.group() for match in CRYPTIC.finditer(text)} <= allowed


def test_a_broken_rule_is_found():
    assert broken("function", "The rows of a batch.") and broken("thing", "Where it is.")
    assert not broken("function", "Returns the rows.") and not broken("thing", "Rows of a batch.")
    assert CRYPTIC.search("A cache of its own stands in the way")


def test_exceptions_are_few_and_needed():
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS
    for file, words in EXCEPTIONS:
        assert words in (REPOSITORY / file).read_text(encoding="utf-8")


def test_documents_are_short():
    texts = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "docs").glob("*.md")]
    written = [
        re.sub(r"<!-- table.*?end of table -->", "", text, flags=re.DOTALL) for text in texts
    ]
    words = [word for text in written for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS
