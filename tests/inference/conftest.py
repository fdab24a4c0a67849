"""Fixture that runs bulk inference with a stub in place of a model."""

import pytest

from tests.inference.echo import Runner


@pytest.fixture
def runner(tmp_path) -> Runner:
    """Provides a ``Runner`` of ``Echo`` over 11 lines, in 4 shards."""
    source = tmp_path / "lines.txt"
    lengths = [3, 25, 7, 18, 5, 3, 25, 7, 18, 5, 3]
    source.write_text("".join(f"{n:02} {'x' * length}\n" for n, length in enumerate(lengths)))
    return Runner(tmp_path, source)
