"""The tests of the CPU's kernels, for a GPT."""

import numpy as np
import pytest

from tests.contrib.lm.toys import tiny_gpt

pytest.importorskip("spec_t5x.contrib.cpu")
from tests.contrib.cpu import test_bit_equality, test_calls, test_panels  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def gpt_is_known(monkeypatch):
    """Adds a GPT to the models that are known by name."""
    wide = {"emb_dim": 144, "num_heads": 6, "vocab_size": 300}
    monkeypatch.setitem(test_bit_equality.MODELS, "gpt", lambda: tiny_gpt(0, **wide))


def test_a_block_has_the_bits_of_one_token_at_a_time():
    test_bit_equality.test_a_block("gpt", 40, 9)
    test_bit_equality.test_the_beginning_of_a_block("gpt", 1)
    test_bit_equality.test_a_tree("gpt", 30)
    test_bit_equality.test_hypotheses_of_a_beam("gpt")


def test_logits_are_those_of_xla():
    test_calls.test_logits_are_those_of_xla(tiny_gpt, "auto")


def test_it_gives_back_its_parameters():
    test_panels.test_a_model_gives_back_its_parameters(tiny_gpt)


def test_what_is_read_in_bfloat16_gives_the_text_of_float32(monkeypatch):
    test_panels.test_what_is_read_in_fewer_bits_gives_the_text_of_more(
        "lm-target", {"_narrow": np.asarray}, 0.51, None, monkeypatch
    )
