"""A command in a process of the tests, with a log of its output.

In a process forked from one that has imported JAX but asked it for nothing yet, so that a
start costs no seconds.
"""

import os
import sys


def run(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """Runs ``spec-t5x`` and exits with its status."""
    os.environ.update(environment)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)

    import jax

    from spec_t5x.cli.main import main

    # Compiling is what most of a test's time would go to.
    jax.config.update("jax_disable_most_optimizations", True)
    sys.exit(main(arguments))
