"""Fixture of the core's commands, for those of ``labs``."""

from tests.cli.conftest import run  # noqa: F401
