"""Fixtures of the core's commands, for those of ``labs``."""

from tests.cli.conftest import nothing_bound, run  # noqa: F401
