"""Random weights: the same whenever they are read, and nothing ends a text."""

import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.errors import InputError
from spec_t5x.experiments.neighbours import ours
from spec_t5x.experiments.neighbours.interface import Job
from spec_t5x.experiments.neighbours.random_weights import random_weights, write_random
from spec_t5x.models import sizes
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = {
    "vocab_size": 384,
    "emb_dim": 16,
    "num_heads": 2,
    "head_dim": 8,
    "mlp_dim": 24,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
GATED = {"mlp_activations": ("gelu", "linear"), "logits_via_embedding": False}
CONFIGS = {"1.1": T5Config(**TINY, **GATED), "1.0": T5Config(**TINY)}


@pytest.fixture(params=list(CONFIGS))
def version(request, monkeypatch) -> str:
    """A tiny size among the published ones."""
    monkeypatch.setitem(sizes.SIZES, f"tiny {request.param}", CONFIGS[request.param])
    return request.param


def test_a_tensor_is_the_same_in_any_order_and_in_parts():
    paths = list(expected_shapes(CONFIGS["1.1"]))
    everything = (slice(None), slice(None))
    forwards, backwards = (random_weights(CONFIGS["1.1"], seed=3) for _ in range(2))
    ours = {path: forwards.read(path, everything[: len(shape(path))]) for path in paths}
    for path in reversed(paths):
        index = everything[: len(shape(path))]
        np.testing.assert_array_equal(backwards.read(path, index), ours[path])
        np.testing.assert_array_equal(backwards.read(path, (slice(2, 5),)), ours[path][2:5])
    other = random_weights(CONFIGS["1.1"], seed=4)
    kernels = [path for path in paths if path.endswith("kernel")]
    assert all(not np.array_equal(other.read(p, everything), ours[p]) for p in kernels)
    assert len({ours[path].tobytes() for path in kernels}) == len(kernels)


def shape(path: str) -> tuple[int, ...]:
    return expected_shapes(CONFIGS["1.1"])[path]


def test_what_is_written_decodes_to_its_last_token(version, tmp_path):
    config = write_random(tmp_path / "model", f"tiny {version}", seed=0)
    assert config == CONFIGS[version]
    assert load(tmp_path / "model").config == config
    job = Job(
        target=str(tmp_path / "model"),
        target_copy=str(tmp_path / "model"),
        scratch=str(tmp_path),
        max_source_len=16,
        max_decode_len=20,
        threads=1,
    )
    found = ours.make(job).decode([*range(3, 18), EOS_ID], 20)
    assert len(found) == 20
    assert not {EOS_ID, PAD_ID} & set(found)


def test_a_size_that_is_unknown_is_refused(tmp_path):
    with pytest.raises(InputError, match="no T5 size is called 'large'"):
        write_random(tmp_path / "model", "large", seed=0)
