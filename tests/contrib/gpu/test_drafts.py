"""The target's texts with every named draft where an H100's kernels are the default."""

import functools
from unittest import mock

import jax
import pytest

from spec_t5x.checkpoints.named_models import Models
from spec_t5x.contrib.gpu import layers
from spec_t5x.contrib.gpu.kernels import SWITCH
from spec_t5x.contrib.gpu.operations import GPU, GpuOperations
from spec_t5x.generation import GenerateOptions, Generator
from tests import named_drafts
from tests.conftest import write_tiny_pair
from tests.named_drafts import every_named_draft, named

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TEXTS = ["a green bird sings", "Es regnet"]
OPTIONS = GenerateOptions(gamma=2, max_decode_len=12, batch_size=1)


@pytest.fixture(autouse=True)
def default_kernels(monkeypatch):
    monkeypatch.setattr(GpuOperations, "state", lambda self: (True, ""))
    monkeypatch.delenv(SWITCH, raising=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Provides a pair whose heads Triton can compute, and all drafts for its target."""
    directory = tmp_path_factory.mktemp("pair")
    write_tiny_pair(directory, head_dim=16)
    named_drafts.write(directory)
    return directory


def tokens_of(target, draft="none", **changes):
    models = Models(target=str(target), draft=draft, dtype="bfloat16", **changes)
    generator = Generator.load_named(models)
    assert generator.target.operations is GPU
    return [each[0].output_ids for each in generator.generate(TEXTS, OPTIONS)]


@functools.cache
def plain_tokens(target):
    return tokens_of(target)


def test_kernels_attend(pair):
    jax.clear_caches()
    with mock.patch.object(layers, "attend_to_text", wraps=layers.attend_to_text) as attend:
        tokens_of(pair / "target")
    # Prefills of the prompt and steps, of two layers.
    assert attend.call_count >= 2


@every_named_draft
def test_generate_writes_the_targets_text(draft, pair):
    assert tokens_of(pair / "target", named(draft, pair)) == plain_tokens(pair / "target")


@pytest.mark.parametrize("changes", [{"weights": "int8"}, {"kv": "int8"}])
def test_generate_with_fewer_bits_writes_the_targets_text(changes, pair):
    target, draft = pair / "target", str(pair / "draft")
    assert tokens_of(target, draft, **changes) == tokens_of(target, **changes)
