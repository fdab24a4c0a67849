"""Drafts that embed another number of ids than their targets."""

import dataclasses

import numpy as np
import pytest

from spec_t5x.checkpoints.fitting import fitted
from spec_t5x.checkpoints.loading import load, open_model
from spec_t5x.checkpoints.own.native import save_model
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.models.t5 import T5Config
from spec_t5x.testing.toy_models import tiny_t5
from tests.checkpoints.faults import message_of

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TEXTS = ["the quick brown fox", "jumps over lazy dogs", "seven wizards", "box the quick dogs"]
SMALL, LARGE = 40, 56
# The tiny vocabulary has 40 pieces.
SIZES = [(SMALL, LARGE), (LARGE, SMALL)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(tmp_path_factory, vocabulary, request):
    """Targets and drafts of both sizes; the drafts know much of the targets."""
    root = tmp_path_factory.mktemp("sizes")
    for rows in (SMALL, LARGE):
        changes = {"vocab_size": rows, "logits_via_embedding": request.param}
        for name, layers in (("target", 2), ("draft", 1)):
            model = tiny_t5(2, num_decoder_layers=layers, **changes)
            save_model(root / f"{name}-{rows}", model.params, model.config, vocabulary)
    return root


@pytest.mark.parametrize(("rows", "of_draft"), SIZES)
@pytest.mark.parametrize("draft", ["{}", "mixed:{}"])
def test_texts_are_the_targets(directory, rows, of_draft, draft):
    options = GenerateOptions(gamma=3, max_decode_len=16, batch_size=2)
    target = directory / f"target-{rows}"
    plain = [a.output_ids for a, *_ in Generator.load(target).generate(TEXTS, options)]
    assert len({token for ids in plain for token in ids}) > 8
    generator = Generator.load(target, draft.format(directory / f"draft-{of_draft}"))
    found = [answer for answer, *_ in generator.generate(TEXTS, options)]
    assert [answer.output_ids for answer in found] == plain
    assert sum(answer.accepted for answer in found) > 0
    # Sampled texts are all the target's, too.
    sampled = generator.generate(TEXTS, options, temperature=3.0)
    assert all(token < rows for answer, *_ in sampled for token in answer.output_ids)


@pytest.mark.parametrize(("rows", "of_draft"), SIZES)
def test_rows_that_both_have_are_kept(directory, rows, of_draft):
    target = load(directory / f"target-{rows}")
    before = load(directory / f"draft-{of_draft}")
    stored = fitted(open_model(directory / f"draft-{of_draft}"), target)
    after = stored.load(dtype="float32")
    tables = before.params["token_embedder"], after.params["token_embedder"]
    old, new = (np.asarray(table["embedding"]) for table in tables)
    assert len(new) == after.config.vocab_size == rows
    np.testing.assert_array_equal(new[:SMALL], old[:SMALL])
    assert not new[of_draft:].any()
    assert after.config.added_rows == (1 + rows - of_draft if rows > of_draft else 0)


def test_the_draft_is_checked_as_it_is(directory):
    stored = open_model(directory / f"draft-{SMALL}")
    other = T5Config(**{**stored.config.to_dict(), "emb_dim": 8})
    target = load(directory / f"target-{LARGE}")
    broken = dataclasses.replace(stored, config=other)
    assert "do not fit the model's configuration" in message_of(fitted, broken, target)
