"""Fixtures that tests of commands share."""

import gin
import pytest

from spec_t5x.cli.main import main
from tests.cli.results import Result


@pytest.fixture(autouse=True)
def nothing_bound():
    """Clears gin's bindings, which other tests may have left."""
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture
def run(capsys):
    """Provides ``run(*arguments)``, the ``Result`` of ``spec-t5x`` in this process."""

    def run_main(*arguments) -> Result:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = exit_.code
        captured = capsys.readouterr()
        return Result(status, captured.out.splitlines(), captured.err.splitlines())

    return run_main
