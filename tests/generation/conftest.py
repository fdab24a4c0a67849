"""Models that tests of generation share, and their outputs."""

import pytest

from spec_t5x.generation import Generator
from tests.generation.cases import ENDS, GREEDY, LONGER, TEXTS


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


@pytest.fixture(scope="module")
def greedy_alone(generator) -> dict[str, list]:
    """Decodes each text by itself at temperature 0."""
    return {text: next(generator.generate([text], GREEDY)) for text in [*TEXTS, ENDS, LONGER]}
