"""T5Gemma beside T5X: its networks are not built there."""

import pytest

from spec_t5x.errors import InputError

pytest.importorskip("t5x.models", reason="needs T5X")

from spec_t5x.t5x_plugin.drafts import ModelDraft


@pytest.mark.usefixtures("unchecked")
def test_no_draft_is_a_t5gemma():
    with pytest.raises(InputError, match="ModelDraft is of T5GemmaConfig.*size of a T5"):
        ModelDraft(size="t5gemma_s_s")
