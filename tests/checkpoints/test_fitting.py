"""Drafts that embed another number of ids than their targets."""

import dataclasses

import jax
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load, open_model
from spec_t5x.checkpoints.make_draft import fitted
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.training.exports import save_model
from spec_t5x.models.t5 import T5Config
from tests.checkpoints.faults import message_of
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

# As ids: the pieces of the tiny vocabulary depend on SentencePiece's release.
SOURCES = [[5, 6, 7, 8, 5, 1], [9, 9, 4, 1], [3, 12, 20, 33, 1], [7, 6, 5, 14, 30, 1]]
SMALL, LARGE = 40, 56
# The tiny vocabulary has 40 pieces.
SIZES = [(SMALL, LARGE), (LARGE, SMALL)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(tmp_path_factory, vocabulary, request):
    """Provides one model with tables of two sizes."""
    root = tmp_path_factory.mktemp("sizes")
    model = tiny_t5(1, vocab_size=SMALL, logits_via_embedding=request.param)
    rng = np.random.default_rng(0)
    for rows in (SMALL, LARGE):

        def sized(path, leaf, rows=rows):
            if SMALL not in leaf.shape:
                return leaf
            more = [(0, rows - SMALL if length == SMALL else 0) for length in leaf.shape]
            return np.where(
                np.pad(np.ones(leaf.shape, bool), more),
                np.pad(leaf, more),
                rng.normal(0, np.std(leaf), np.add(leaf.shape, np.sum(more, axis=1))),
            ).astype(np.float32)

        params = jax.tree.map_with_path(sized, model.params)
        config = dataclasses.replace(model.config, vocab_size=rows)
        save_model(root / str(rows), params, config, vocabulary)
    return root


@pytest.mark.parametrize(
    ("rows", "of_draft", "draft"), [(*SIZES[0], "{}"), (*SIZES[1], "{}"), (*SIZES[1], "mixed:{}")]
)
def test_texts_are_the_targets(directory, rows, of_draft, draft):
    options = GenerateOptions(gamma=3, max_decode_len=16, batch_size=2)
    target = directory / str(rows)
    plain = [a.output_ids for a, *_ in Generator.load(target).generate_ids(SOURCES, options)]
    assert len({token for ids in plain for token in ids}) > 5
    generator = Generator.load(target, draft.format(directory / str(of_draft)))
    found = [answer for answer, *_ in generator.generate_ids(SOURCES, options)]
    assert [answer.output_ids for answer in found] == plain
    assert sum(answer.accepted for answer in found) > 0
    # Sampled texts are all the target's, too.
    sampled = generator.generate_ids(SOURCES, options, temperature=3.0)
    assert all(token < rows for answer, *_ in sampled for token in answer.output_ids)


@pytest.mark.parametrize(("rows", "of_draft"), SIZES)
def test_rows_that_both_have_are_kept(directory, rows, of_draft):
    target = load(directory / str(rows))
    before = load(directory / str(of_draft))
    stored = fitted(open_model(directory / str(of_draft)), target)
    after = stored.load(dtype="float32")
    tables = before.params["token_embedder"], after.params["token_embedder"]
    old, new = (np.asarray(table["embedding"]) for table in tables)
    assert len(new) == after.config.vocab_size == rows
    np.testing.assert_array_equal(new[:SMALL], old[:SMALL])
    assert not new[of_draft:].any()
    assert after.config.added_rows == (1 + rows - of_draft if rows > of_draft else 0)


def test_the_draft_is_checked_as_it_is(directory):
    stored = open_model(directory / str(SMALL))
    other = T5Config(**{**stored.config.to_dict(), "emb_dim": 8})
    target = load(directory / str(LARGE))
    broken = dataclasses.replace(stored, config=other)
    assert "do not fit the model's configuration" in message_of(fitted, broken, target)
