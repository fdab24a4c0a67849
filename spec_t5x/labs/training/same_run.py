"""Record of what a run was started with: a resumed run continues with the same, or is refused.

The checkpoints themselves refuse other training pairs, and parameters of other shapes.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.data.text_files import raw_lines
from spec_t5x.errors import InputError
from spec_t5x.inference.processes import locked
from spec_t5x.labs.training.run_checkpoints import has_checkpoints
from spec_t5x.labs.writing import reported
from spec_t5x.machine.atomic import write_whole
from spec_t5x.models.t5 import NetworkConfig

# The file in a run's directory.
RECORD = "run.json"
# Fields of a network's configuration that a training chooses: they do not change its parameters.
FREE = ("dropout_rate", "dtype")


def digest(*values: Any) -> str:
    """Returns the SHA-256 (hex) of the leaves of trees: an array's bytes, another leaf's repr."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, jax.Array | np.ndarray):
            # A copy, since an array keeps what is read of it on the host.
            leaf = np.asarray(jnp.copy(leaf)) if isinstance(leaf, jax.Array) else leaf
            found.update(np.ascontiguousarray(leaf).view(np.uint8).data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def network_settings(config: NetworkConfig) -> str:
    """Returns the fields of a network's configuration, but those that a training chooses."""
    fields = dataclasses.asdict(config)
    return repr({name: value for name, value in fields.items() if name not in FREE})


@contextlib.contextmanager
def held_run(directory: Path, values: Mapping[str, str | None]) -> Iterator[None]:
    """Holds a run's directory within the ``with``, and records what the run starts with, by name.

    Raises:
        InputError: another run holds the directory (if its file system has locks), or it has
            checkpoints, and a record beside them has other values.
    """
    path = directory / RECORD
    with reported(path):
        directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, needed=False):
        if has_checkpoints(directory) and path.is_file():
            recorded = json.loads(path.read_text())
            for name, value in values.items():
                if recorded.get(name, "") != value:
                    raise InputError(
                        f"the checkpoints in {directory} are of a run with another {name}: give "
                        "the earlier one, or another output directory"
                    )
        with reported(path):
            write_whole(path, [json.dumps(values, indent=1).encode() + b"\n"])
        yield


def train_once(
    path: Path, files: Sequence[Path], settings: Any, train: Callable[[], object]
) -> None:
    """Calls ``train``, which writes a vocabulary to ``path``, unless it was trained there before.

    ``path`` is in a folder of the run's directory. Files of other content, or other ``settings``,
    give another vocabulary.

    Raises:
        InputError: a file cannot be read, or the run has checkpoints with another vocabulary.
    """
    found, record = hashlib.sha256(repr(settings).encode()), path.with_name("trained.sha256")
    for file in files:
        for line in raw_lines(file):
            found.update(line)
    # Without a record, the user has put it there.
    if path.is_file() and not (record.is_file() and record.read_text() != found.hexdigest()):
        return
    if has_checkpoints(path.parents[1]):
        raise InputError(
            f"{path} was trained on other texts, or for another vocab_size, and the run has "
            "checkpoints: give the earlier ones, or another output directory"
        )
    train()
    record.write_text(found.hexdigest())
