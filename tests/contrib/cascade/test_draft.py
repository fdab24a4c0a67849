"""Tests of cascades: those of every draft, and those of their parts."""

import functools
import itertools

import flax.struct
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import find_models, make_draft
from spec_t5x.contrib.cascade.draft import CascadeDraft
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.training.exports import save_shared_draft
from spec_t5x.labs.training.kept_layers import keep_layers
from spec_t5x.models.shared_params import own_params
from tests.drafts import test_every_draft as every_draft
from tests.loops import test_laws_against_transformers as theirs
from tests.loops import test_ruled
from tests.loops.test_laws_against_transformers import laws, small_models  # noqa: F401
from tests.toy_drafts import StubTarget

pytestmark = pytest.mark.usefixtures("quick_compilation", "unchecked")


def cascade():
    """Makes a cascade of the models of ``test_every_draft``, which other tests replace."""
    return CascadeDraft(every_draft.near(), TransformerDraft(every_draft.tiny_t5(2)))


def of_a_cascade():
    inner = CascadeDraft(every_draft.tiny_t5(2), CopyDraft(every_draft.VOCAB))
    return CascadeDraft(every_draft.near(), inner, inner_gamma=3)


def of_a_mixture():
    inner = MixedDraft(CopyDraft(every_draft.VOCAB), TransformerDraft(every_draft.tiny_t5(2)))
    return CascadeDraft(every_draft.near(), inner, inner_gamma=3)


def mixed_with_a_cascade():
    return MixedDraft(CopyDraft(every_draft.VOCAB, min_match=2), cascade())


def doubting():
    return every_draft.doubting(cascade())


DRAFTS = {
    "cascade": cascade,
    "cascade of a cascade": of_a_cascade,
    "cascade of a mixture": of_a_mixture,
    "mixed with a cascade": mixed_with_a_cascade,
    "mixed with a cascade, second": doubting,
}


@pytest.fixture(autouse=True)
def cascades_are_known(monkeypatch):
    """Adds cascades to the drafts of tests that know them by name."""
    for name, make in DRAFTS.items():
        for known in (every_draft.T5_DRAFTS, test_ruled.DRAFTS, theirs.DRAFTS):
            monkeypatch.setitem(known, name, make)


@pytest.mark.parametrize("name", ["cascade of a cascade", "mixed with a cascade"])
def test_the_greedy_text_is_that_of_plain_decoding(name):
    every_draft.test_the_greedy_text_is_that_of_plain_decoding(name)


def test_mixed_with_another_draft_it_is_as_every_draft_is():
    name = "mixed with a cascade"
    every_draft.test_a_row_decodes_as_it_does_beside_other_rows(name)
    every_draft.test_coupled_the_text_depends_on_the_key_alone(name)
    every_draft.test_after_refusals_and_plain_steps_a_draft_proposes_what_a_fresh_one_would(
        f"{name}, second"
    )


@pytest.mark.parametrize("name", ["cascade", "cascade of a mixture"])
def test_calls_for_other_rows_change_no_proposal_of_a_row(name):
    every_draft.test_calls_for_other_rows_change_no_proposal_of_a_row(name)


@pytest.mark.parametrize(
    ("draft", "name"), zip(DRAFTS, itertools.cycle(test_ruled.RULES), strict=False)
)
def test_rules_of_decoding_are_kept(draft, name):
    test_ruled.test_the_text_is_that_of_plain_decoding(draft, name, "block")


@test_ruled.every_rule
def test_a_middle_model_that_is_the_target_keeps_the_rules_too(name):
    """Every proposal is accepted, but for those after the end of a text."""
    draft = CascadeDraft(every_draft.target(), TransformerDraft(every_draft.near()))
    stats = every_draft.decode(draft, settings=test_ruled.settings(name)).stats
    assert np.all(stats.accepted >= 3 * stats.target_calls - 3)


@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize("draft", ["cascade", "mixed with a cascade, second"])
def test_texts_follow_the_law_of_transformers(laws, draft):  # noqa: F811
    theirs.test_texts_follow_the_law_of_transformers(laws, draft, "block")


def test_the_middle_model_has_positions_for_the_texts():
    @flax.struct.dataclass
    class Short(StubTarget):
        max_positions = 8

    draft = CascadeDraft(Short(None, every_draft.VOCAB), CopyDraft(every_draft.VOCAB))
    draft.check(every_draft.tiny_t5(0), 8)
    with pytest.raises(InputError, match="the draft has 8 positions and max_decode_len is 9"):
        draft.check(every_draft.tiny_t5(0), 9)


@pytest.mark.parametrize(
    ("inner", "gamma", "message"),
    [
        (CopyDraft(9), 2, "the draft has 9 tokens and the target"),
        (None, 2, "NoneType has no vocab_size"),
        (CopyDraft(every_draft.VOCAB), 0, "inner_gamma is 0: give at least 1"),
        (CopyDraft(every_draft.VOCAB), "2", "inner_gamma is '2': give a whole number"),
    ],
)
def test_its_parts_fit_together(inner, gamma, message):
    with pytest.raises(InputError, match=message):
        CascadeDraft(every_draft.near(), inner, gamma).check(every_draft.target(), 8)


@pytest.mark.usefixtures("unchecked")
def test_a_head_on_the_targets_states_cannot_draft_in_it():
    middle = every_draft.tiny_t5(0, emb_dim=24)
    with pytest.raises(InputError, match="EagleDraft reads the target's states, so it cannot"):
        CascadeDraft(middle, every_draft.eagle()).check(every_draft.target(), 8)


@functools.cache
def packaged():
    loaded = load("t5-target")
    return loaded, loaded.bind()


def test_it_is_made_by_its_name():
    made = make_draft("cascade", *packaged())
    assert type(made) is CascadeDraft and made.vocab_size == packaged()[1].vocab_size
    assert isinstance(make_draft("cascade:int8,copy", *packaged()).draft, CopyDraft)
    with pytest.raises(InputError, match="has no weights of a model: leave draft_weights out"):
        make_draft("cascade:int8,copy", *packaged(), DraftOptions(weights="int4"))
    # The weights are those of the model, not of the draft after it.
    rounded = make_draft("cascade:t5-draft,copy", *packaged(), DraftOptions(weights="int8"))
    assert isinstance(rounded.draft, CopyDraft)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cascade:int8,copy:x", "draft copy:x: give a whole number"),
        ("cascade:,copy", "draft 'transformer' is not packaged"),
        ("cascade:t5-draft,int8", "draft int8 reads the target's cache"),
        ("cascade:int8,mixed:mixed:eagle", "draft mixed:mixed:eagle reads the target's cache"),
    ],
)
def test_its_drafts_are_checked_before_a_target_is_loaded(tmp_path, name, message):
    # The folder is empty: nothing of a checkpoint is read.
    with pytest.raises(InputError, match=message):
        find_models(tmp_path, [name])


def test_its_cheap_draft_shares_nothing_with_the_target(tiny_pair, tmp_path):
    loaded, layers = load(tiny_pair / "target"), (1,)
    encoder = range(loaded.config.num_encoder_layers)
    params, config = keep_layers(loaded.params, loaded.config, encoder=encoder, decoder=layers)
    save_shared_draft(tmp_path / "shared", own_params(params), config, layers, loaded)
    model, shared = loaded.bind(), tmp_path / "shared"
    for inner in (shared, f"mixed:{shared}", "int8", "mixed:int4", "early_exit:1"):
        with pytest.raises(InputError, match="in a cascade it would draft for"):
            make_draft(f"cascade:{tiny_pair / 'draft'},{inner}", loaded, model)
    # A rounded target has the target's cache.
    assert type(make_draft("cascade:int8,early_exit:1", loaded, model)) is CascadeDraft
