"""A umT5, with a relative bias in every layer, and drafts of all kinds made of it."""

import numpy as np
import pytest

from spec_t5x.checkpoints.native.model_files import save_model
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.testing.toy_models import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TEXTS = ["the quick brown fox", "jumps over lazy dogs", "seven wizards", "box the quick dogs"]
OPTIONS = GenerateOptions(gamma=2, max_decode_len=12, batch_size=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, vocabulary):
    """A target, and a smaller model as its draft."""
    root = tmp_path_factory.mktemp("umt5")
    for name, seed, layers in (("target", 2, 2), ("draft", 3, 1)):
        model = tiny_t5(seed, vocab_size=40, num_decoder_layers=layers, relpos_per_layer=True)
        save_model(root / name, model.params, model.config, vocabulary)
    return root


def tokens_of(generator):
    return [outputs[0].output_ids for outputs in generator.generate(TEXTS, OPTIONS)]


@pytest.fixture(scope="module")
def plain(directory):
    tokens = tokens_of(Generator.load(directory / "target"))
    assert len(np.unique(np.concatenate(tokens))) > 8
    return tokens


@pytest.mark.parametrize("draft", ["{}/draft", "early_exit:1", "int8", "copy"])
def test_generate_writes_the_targets_text(draft, directory, plain):
    generator = Generator.load(directory / "target", draft.format(directory))
    assert generator.target.config.relpos_per_layer
    assert tokens_of(generator) == plain
