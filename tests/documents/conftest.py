"""Fixture that runs commands of documents up to the parsing of gin."""

from pathlib import Path

import pytest

from spec_t5x.cli import gin_files
from spec_t5x.cli.main import main


class Parsed(BaseException):
    """Exception that stops a command after it has parsed its gin files and bindings."""


@pytest.fixture
def parse(monkeypatch):
    """Provides ``parse(*words)``, which runs a command until it has parsed gin.

    Paths are relative to the repository.
    """
    parse_gin = gin_files.parse_gin

    def parse_and_stop(files, flags):
        parse_gin(files, flags)
        raise Parsed

    def run(*words):
        with pytest.raises(Parsed):
            main(list(words))

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(gin_files, "parse_gin", parse_and_stop)
    return run
