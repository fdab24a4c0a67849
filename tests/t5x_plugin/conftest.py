"""Fixtures of the plug-in's tests."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Allows rank promotion, which T5X uses; overrides the fixture of the other tests."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def launches(tmp_path_factory, tiny_pair):
    """Provides ``Launches`` in a new folder with checkpoints that T5X wrote."""
    from tests.t5x_plugin.launches import Launches

    return Launches(tmp_path_factory.mktemp("launches"), tiny_pair)
