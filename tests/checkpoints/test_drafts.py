"""Drafts by name: what the command line says becomes the draft that it means."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x import registry
from spec_t5x.checkpoints import loading
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import find_models, make_draft
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.kinds import DraftKind, DraftOptions
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.ngram import NgramDraft
from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.machine.operations import XLA
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def packaged():
    loaded = load("t5-target")
    return loaded, T5Model.create(loaded.params, loaded.config)


@pytest.fixture(scope="module")
def tiny(tiny_pair):
    loaded = load(tiny_pair / "target")
    return loaded, T5Model.create(loaded.params, loaded.config)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("unigram", NgramDraft),
        ("copy", CopyDraft),
        ("uniform", UniformDraft),
        ("eagle", EagleDraft),
        ("early_exit", SelfDraft),
        ("mixed", MixedDraft),
        # Packaged names without a kind before them.
        ("t5-draft", TransformerDraft),
        ("t5-ngram", NgramDraft),
        ("t5-eagle", EagleDraft),
    ],
)
def test_every_name_works_with_the_packaged_target(packaged, name, kind):
    draft = make_draft(name, *packaged)
    assert type(draft) is kind
    assert draft.vocab_size == packaged[1].vocab_size


def test_what_is_registered_as_a_draft_and_is_no_kind_of_drafts_is_named(packaged, monkeypatch):
    monkeypatch.setitem(registry._PLACES["draft"], "parrot", "math:pi")
    for make in (
        lambda: make_draft("parrot", *packaged),
        lambda: find_models("t5-target", ["parrot"]),
    ):
        with pytest.raises(
            InputError, match="^draft 'parrot' is registered as 3.14.*: give a Draft"
        ):
            make()


def test_arguments_follow_a_colon(packaged):
    assert make_draft("copy:3", *packaged).min_match == 3
    assert make_draft("early_exit:2", *packaged).model.config.num_decoder_layers == 2
    assert make_draft("mixed:bigram", *packaged).second.order == 2


def test_copies_follow_the_words_of_the_vocabulary(packaged):
    starts = np.packbits(packaged[0].vocabulary.word_starts()).tobytes()
    copy, mixed = make_draft("copy", *packaged), make_draft("mixed:uniform", *packaged).first
    assert copy == CopyDraft(copy.vocab_size, word_starts=starts)
    # Beside another draft only matches are copied.
    assert mixed == copy.replace(min_match=2, patience=0)


def test_a_target_with_fewer_layers_or_bits(packaged):
    loaded, model = packaged
    layers = loaded.config.num_decoder_layers
    draft = make_draft("early_exit", *packaged)
    assert draft.model.config.num_decoder_layers == layers // 2 > 1
    # XLA computes this model.
    plain = model.replace(weights=model.params, operations=XLA)
    for name, dtype in (("int8", jnp.int8), ("int4", jnp.int4)):
        weights = make_draft(name, loaded, plain).model.weights
        assert weights["decoder"]["layers_0"]["mlp"]["wo"]["kernel"].values.dtype == dtype


@pytest.mark.parametrize(
    "name", ["transformer", "bigram", "eagle", "early_exit", "int8", "int4", "mixed:bigram"]
)
def test_settings_reach_the_draft(packaged, name):
    draft = make_draft(name, *packaged, DraftOptions(settings=sampling(0.5)))
    assert float(getattr(draft, "second", draft).settings.temperature) == 0.5


def test_a_packaged_target_may_end_in_a_slash():
    assert Models(target="t5-target/").draft_name() == Models().draft_name()


def test_flags_give_the_drafts_settings(packaged):
    for name, value in (("top_k", 5), ("top_p", 0.9)):
        models = Models(draft_temperature=0.7, **{f"draft_{name}": value})
        assert models.draft_options().settings == sampling(0.7, **{name: value})
    assert Models().draft_options().settings is None
    with pytest.raises(InputError, match="draft_top_k is 5, draft_top_p 0.0 and draft_temperature"):
        Models(draft_top_k=5)
    with pytest.raises(InputError, match=r"draft_temperature is 1.0 and there is no draft: leave"):
        Models(draft="none", draft_temperature=1.0)
    for settings, message in (
        ({"draft_temperature": float("nan")}, "draft_temperature is nan: give"),
        ({"draft_top_k": -3, "draft_temperature": 1.0}, "draft_top_k is -3: give"),
        ({"draft_top_p": 3.0, "draft_temperature": 1.0}, "draft_top_p is 3.0: give"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            Models(**settings)
    with pytest.raises(InputError, match="draft 'copy' takes no temperature: leave draft_temp"):
        make_draft("copy", *packaged, DraftOptions(settings=sampling(0.5)))


SILENT = DraftKind(make=lambda request, argument: UniformDraft(request.model.vocab_size))


def test_a_kind_takes_only_the_options_that_it_declares(packaged, monkeypatch):
    monkeypatch.setitem(registry._PLACES, "draft", dict(registry._PLACES["draft"]))
    registry.register("draft", silent=f"{__name__}:SILENT")
    assert isinstance(make_draft("silent", *packaged), UniformDraft)
    for option, message in (
        ({"settings": sampling(0.5)}, "draft 'silent' takes no temperature: leave"),
        ({"weights": "int4"}, "draft 'silent' has no weights of a model: leave"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            make_draft("silent", *packaged, DraftOptions(**option))


@pytest.mark.parametrize("name", ["transformer", "bigram", "eagle"])
def test_another_target_has_no_packaged_drafts(tiny, name):
    with pytest.raises(InputError, match=r"is not packaged for .*: give \w+:DIR$"):
        make_draft(name, *tiny)


@pytest.mark.parametrize("name", ["transformer:t5-draft", "ngram:t5-ngram", "eagle:t5-eagle"])
def test_drafts_of_another_vocabulary_are_refused(tiny, name):
    with pytest.raises(InputError, match="vocab|width"):
        make_draft(name, *tiny)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "no draft 'nonsense': give the directory of a checkpoint, OWNER/NAME"),
        (
            "t5-drat",
            r"no draft 't5-drat', did you mean 't5-draft'\?: give .*, or one of .*t5-draft",
        ),
        ("mixd:int8", r"no draft 'mixd:int8', did you mean 'mixed'\?: give the directory"),
        ("t5-large", "no draft 't5-large': give the directory"),
        ("early_exit:8", "early exit after 8 of 8"),
        ("uniform:3", "uniform:3: uniform takes no argument"),
    ],
)
def test_what_cannot_be_made_is_refused(packaged, name, message):
    with pytest.raises(InputError, match=message):
        make_draft(name, *packaged)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("copy:x", "draft copy:x: give a whole number from 1 after the colon"),
        ("copy:0", "draft copy:0: give a whole number from 1"),
        ("early_exit:00", "draft early_exit:00: give a whole number from 1"),
        ("early_exit:half", "draft early_exit:half: give a whole number"),
        ("int8:4", "draft int8:4: int8 takes no argument"),
        ("mixed:uniform:3", "draft uniform:3: uniform takes no argument"),
    ],
)
def test_arguments_are_refused_before_a_target_is_loaded(tmp_path, draft, message):
    # The folder is empty: nothing of a checkpoint is read.
    with pytest.raises(InputError, match=message):
        find_models(tmp_path, [draft])


WITHOUT_TEMPERATURE = ["copy", "uniform", "mixed:copy", "mixed:uniform", "mixed:mixed:copy"]
WITHOUT_WEIGHTS = [*WITHOUT_TEMPERATURE, "int8", "int4", "early_exit", "bigram", "mixed:int8"]


@pytest.mark.parametrize("draft", WITHOUT_WEIGHTS)
def test_options_of_no_part_of_a_draft_are_refused_before_a_target_is_loaded(tmp_path, draft):
    warm = DraftOptions(settings=sampling(0.5))
    refused = [(DraftOptions(weights="int8"), "has no weights of a model: leave draft_weights")]
    if draft in WITHOUT_TEMPERATURE:
        refused.append((warm, "takes no temperature: leave draft_temperature out"))
    for options, message in refused:
        for find, drafts in ((find_models, [draft]), (Generator.load, draft)):
            with pytest.raises(InputError, match=f"^draft '{draft}' {message}"):
                find(tmp_path, drafts, options)
    if draft not in WITHOUT_TEMPERATURE:
        with pytest.raises(InputError, match="holds no config.json"):
            Generator.load(tmp_path, draft.replace("bigram", "bigram:t5-ngram"), warm)


def test_each_model_is_opened_once(tiny_pair, monkeypatch):
    opened, open_model = [], loading.open_model

    def noted(name, **options):
        opened.append(name)
        return open_model(name, **options)

    monkeypatch.setattr(loading, "open_model", noted)
    target, draft = (str(tiny_pair / name) for name in ("target", "draft"))
    stored = find_models(target, [f"mixed:{draft}"])
    assert opened == [target, draft]
    loaded, generator = Generator.load_target(stored, "float32")
    made = make_draft(f"mixed:{draft}", loaded, generator.target)
    assert opened == [target, draft] and isinstance(made.second, TransformerDraft)
    # Its file is not kept open: another draft of this name is opened again.
    assert not any(stored.drafts.values()) and stored.drafts is loaded.drafts
    make_draft(draft, loaded, generator.target)
    assert opened == [target, draft, draft]
