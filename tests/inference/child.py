"""Command in a child process of a test, with its output in a log file.

The child is forked from a process that has imported JAX but not initialized it, which saves the
seconds of an import.
"""

import itertools
import os
import sys
import time


def run(
    arguments: list[str], log: str, environment: dict[str, str], most: int | None = None
) -> None:
    """Runs ``spec-t5x``, its output and errors in the file ``log``; exits with its status.

    Once it has written ``most`` shards, it waits for a signal.
    """
    os.environ.update(environment)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)

    import jax

    from spec_t5x.cli.main import main
    from spec_t5x.inference.run_directory import Shards

    write, numbers = Shards.write, itertools.count(1)

    def write_some(*shard):
        write(*shard)
        is_last = next(numbers) == most
        while is_last:
            time.sleep(0.01)

    Shards.write = write_some

    # Compilation would take most of a test's time.
    jax.config.update("jax_disable_most_optimizations", True)
    sys.exit(main(arguments))
