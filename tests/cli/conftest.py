"""Fixtures that tests of commands share."""

import pytest

from spec_t5x.cli.main import main
from tests.cli.results import Result


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
