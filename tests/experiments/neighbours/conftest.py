"""A tiny pair in everybody's format, and what our plain decoding makes of some inputs."""

import pytest

from spec_t5x.checkpoints.convert import convert
from spec_t5x.experiments.neighbours import ours
from spec_t5x.experiments.neighbours.interface import Job
from spec_t5x.generation import GenerateOptions, Generator

# Of one bucket, so that each program is compiled once; the second's output ends early.
TEXTS = ("My sister", "Wir gehen", "Nobody knows")
MAX_DECODE_LEN = 12


@pytest.fixture(scope="session")
def job(tiny_pair, tmp_path_factory) -> Job:
    """The tiny pair with its copies."""
    folder = tmp_path_factory.mktemp("neighbours")
    for name in ("target", "draft"):
        convert(tiny_pair / name, folder / name, to="huggingface", dtype="float32")
    return Job(
        target=str(tiny_pair / "target"),
        target_copy=str(folder / "target"),
        draft=str(tiny_pair / "draft"),
        draft_copy=str(folder / "draft"),
        scratch=str(folder),
        max_source_len=48,
        max_decode_len=MAX_DECODE_LEN,
        threads=1,
    )


@pytest.fixture(scope="session")
def inputs(tiny_pair) -> list[list[int]]:
    """Ids of the texts."""
    generator = Generator.load(tiny_pair / "target")
    options = GenerateOptions(max_source_len=48)
    return [generator.tokenize(text, options) for text in TEXTS]


@pytest.fixture(scope="session")
def outputs(job, inputs) -> list[list[int]]:
    """What our plain decoding makes of them."""
    plain = ours.make(job)
    found = [plain.decode(ids, MAX_DECODE_LEN) for ids in inputs]
    assert len({tuple(ids) for ids in found}) == len(found)
    return found
