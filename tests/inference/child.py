"""What a process of the tests runs: a command, with a log of what it says.

Started by ``runpy`` in a process forked from one that has imported JAX but asked it for
nothing yet, so that a start costs no seconds. Its globals are given: ARGUMENTS, LOG,
ENVIRONMENT and FILE_LIMIT (bytes in a file, or None).
"""

import os
import random
import resource
import sys

os.environ.update(ENVIRONMENT)  # noqa: F821
log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # noqa: F821
os.dup2(log, 1)
os.dup2(log, 2)

import jax  # noqa: E402

from spec_t5x.cli.main import main  # noqa: E402
from spec_t5x.loops.pace import Costs  # noqa: E402
from spec_t5x.tuning import costs  # noqa: E402

# Compiling is what most of a test's time would go to.
jax.config.update("jax_disable_most_optimizations", True)


def measure(decode, largest, *, whole=False):
    """Costs as if measured: at once, others each time, and of programs that compile soon."""
    c, largest = random.uniform(0.05, 0.2), min(largest, 3)
    return Costs.by_formula(c=c, position=0.05, largest=largest, whole=whole)


costs.measure, costs.remembered = measure, lambda key, measure, store: measure()

if FILE_LIMIT:  # noqa: F821
    # Writing more fails, as on a full disk; Python ignores the signal.
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))  # noqa: F821
sys.exit(main(ARGUMENTS))  # noqa: F821
