"""Reading onto a mesh: every process reads its slices and no more, each of them once."""

import collections
import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import open_model
from spec_t5x.checkpoints.storage import tensors as tensors_lib
from spec_t5x.checkpoints.storage.tensors import array_tensors
from spec_t5x.errors import InputError
from tests.checkpoints.faults import save_t5x
from tests.child import meeting_point, together

# Two processes of four devices each: a mesh of 4 model shards, each on two devices of one
# process. Every process thus holds half of what is sharded.
PROGRAM = """
import dataclasses, json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from spec_t5x.checkpoints.storage import tensors as tensors_lib
from spec_t5x.models.binding import abstract_params
from tests.checkpoints.faults import save_t5x
from spec_t5x.checkpoints.loading import load

address, rank, *directories = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(rank))
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("model", "data"))

def shardings(config):
    def of(leaf):
        axes = [None] * len(leaf.shape)
        if len(axes) == 2 and leaf.shape[0] % 4 == 0:
            axes[0] = "model"
        return NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(of, abstract_params(config))

requested = []
def watched(tensor):
    def read(index):
        part = tensor.read(index)
        requested.append((tensor.name, part.size))
        return part
    return dataclasses.replace(tensor, read=read)
def finite_parts(tensors, *args, parts=tensors_lib._finite_parts):
    return parts({path: watched(tensor) for path, tensor in tensors.items()}, *args)
tensors_lib._finite_parts = finite_parts

for directory in directories:
    requested.clear()
    params = load(directory, shardings=shardings).params
    shards = {
        "/".join(key.key for key in path): [
            [[[s.start or 0, s.stop or n] for s, n in zip(shard.index, leaf.shape)],
             np.asarray(shard.data).tolist()]
            for shard in leaf.addressable_shards
        ]
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    print(json.dumps({"requested": requested, "shards": shards}))
"""


def run_two_processes(directories: list[list[Path]]) -> list[list[dict]]:
    """Returns the output of each process, given its directories."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with meeting_point() as address:
        start = [sys.executable, "-c", PROGRAM, address]
        commands = [[*start, str(rank), *map(str, paths)] for rank, paths in enumerate(directories)]
        said = together(commands, env=environment)
    return [[json.loads(line) for line in lines.splitlines()] for lines, _ in said]


def test_a_process_reads_its_slices_and_each_of_them_once(
    tmp_path, vocabulary, configs, random_params, monkeypatch
):
    config, params = configs["1.1"], random_params(configs["1.1"])
    # Chunks of 12 rows and 8 columns of the embedding, so that none is of both processes.
    monkeypatch.setattr(
        "spec_t5x.checkpoints.storage.tensorstore_arrays._CHUNK_BYTES", 96 * 16 * 4 // 16
    )
    directories = []
    for rank in range(2):
        directories.append([tmp_path / f"checkpoint_{rank}"])
        save_t5x(directories[rank][0], params, config, vocabulary)
        # Half of the embedding is not even there: a process that reads it fails.
        chunks = list((directories[rank][0] / "target.token_embedder.embedding").glob("[0-9]*.*"))
        others = [path for path in chunks if (int(path.name.split(".")[0]) < 4) == (rank == 1)]
        assert len(others) == len(chunks) // 2 > 0
        for path in others:
            path.unlink()
    save_t5x(tmp_path / "checkpoint_5", params, config, vocabulary)
    for to in ("huggingface", "native"):
        convert(tmp_path / "checkpoint_5", tmp_path / to, to=to)
        for paths in directories:
            paths.append(tmp_path / to)
    flat = flatten_dict(params, sep="/")
    for rank, reads in enumerate(run_two_processes(directories)):
        for directory, read in zip(directories[rank], reads, strict=True):
            expected = {
                path: leaf.size // 2 if leaf.ndim == 2 and leaf.shape[0] % 4 == 0 else leaf.size
                for path, leaf in flat.items()
            }
            # By Hugging Face's names where it is theirs.
            found = collections.Counter()
            for name, size in read["requested"]:
                found[name] += size
            assert sorted(found.values()) == sorted(expected.values()), directory
            for path, shards in read["shards"].items():
                assert len(shards) == 4
                for bounds, values in shards:
                    part = flat[path][tuple(slice(*bound) for bound in bounds)]
                    np.testing.assert_array_equal(np.array(values, np.float32), part)


def test_each_slice_is_checked_for_numbers_that_are_not_finite(monkeypatch):
    halves = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    monkeypatch.setattr(tensors_lib, "_local_bounds", lambda shape, sharding: halves)
    for row in (0, 3):
        table = np.zeros((4, 3), np.float32)
        table[row, 1] = np.inf
        parts = tensors_lib._finite_parts(array_tensors({"a": table}), "here", "float32")
        with pytest.raises(InputError, match=r"in 1 of 1 tensors \(a\)"):
            list(parts)


def test_no_more_is_read_ahead_than_fits(t5x_data, monkeypatch):
    """Memory is bounded by what waits to be handed on, for any model."""
    tensors = open_model(t5x_data.legacy).tensors
    monkeypatch.setattr(tensors_lib, "_AHEAD", 3)
    started = []

    def watched(tensor):
        def read(index):
            started.append(tensor.name)
            return tensor.read(index)

        return dataclasses.replace(tensor, read=read)

    tensors = {path: watched(tensor) for path, tensor in tensors.items()}
    for done, _ in enumerate(tensors_lib.read_tensors(tensors, "here", "float32")):
        assert done < len(started) <= done + 3
    assert len(started) == len(tensors)
