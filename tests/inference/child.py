"""Command in a child process of a test, with its output in a log file.

The child is forked from a process that has imported JAX but not initialized it, which saves the
seconds of an import.
"""

import os
import sys


def run(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """Runs ``spec-t5x``, its output and errors in the file ``log``; exits with its status."""
    os.environ.update(environment)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)

    import jax

    from spec_t5x.cli.main import main

    # Compilation would take most of a test's time.
    jax.config.update("jax_disable_most_optimizations", True)
    sys.exit(main(arguments))
