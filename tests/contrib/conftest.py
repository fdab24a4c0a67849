"""Fixtures of the core's tests that tests of contrib use, too."""

from tests.checkpoints.conftest import (  # noqa: F401
    configs,
    random_params,
    spiece,
    t5_spiece,
    vocabulary,
)
