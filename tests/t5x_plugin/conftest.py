"""What holds for every test of the plug-in."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """T5X promotes ranks; overrides the fixture of the other tests."""
    with jax.numpy_rank_promotion("allow"):
        yield
