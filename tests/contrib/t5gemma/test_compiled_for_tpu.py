"""The loops with T5Gemmas, compiled for a TPU v4 without one: no copy of a cache."""

import pytest

from spec_t5x.drafts.transformer import TransformerDraft
from tests.contrib.t5gemma.toys import T5GEMMA2, tiny_t5gemma
from tests.loops.compiled_loops import cache_copies
from tests.loops.test_compiled_for_tpu import on_tpu, v4  # noqa: F401
from tests.loops.test_compiled_loops import check

pytestmark = pytest.mark.usefixtures("unchecked_module")


@pytest.mark.parametrize("changes", [{}, T5GEMMA2], ids=["1", "2"])
def test_compiled_for_a_tpu(v4, changes):  # noqa: F811
    """Heads share keys; in T5Gemma 2, one softmax has text and source."""
    # Caches of a common size, as in ``test_trees``.
    sizes = {"emb_dim": 1024, "mlp_dim": 1024, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128}
    target = tiny_t5gemma(0, **sizes, **changes)
    draft = TransformerDraft(tiny_t5gemma(1, **sizes, **changes, num_decoder_layers=1))
    program = on_tpu(v4, target, draft, max_decode_len=117)
    check(program, target.config, 2, max_decode_len=117)
    # Nor of the source's keys.
    assert not cache_copies(program, [(2, 4, 7, 128)])
