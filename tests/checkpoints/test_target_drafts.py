"""Drafts that share an encoder, on disk: as written, and only for their target."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.make_draft import find_models, make_draft
from spec_t5x.checkpoints.native.target_drafts import load_shared_draft
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.labs.training.exports import save_model, save_shared_draft
from spec_t5x.labs.training.kept_layers import keep_layers, narrowed_params, with_shared
from spec_t5x.models.binding import bind
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5
from spec_t5x.models.shared_params import own_params
from spec_t5x.sampling.distributions import sampling
from tests.checkpoints.faults import edit_config, message_of

LAYERS = (0, 2)


@pytest.fixture
def target(configs, random_params, vocabulary, tmp_path):
    config = dataclasses.replace(configs["1.1"], num_decoder_layers=3)
    return LoadedModel(
        params=random_params(config),
        config=config,
        vocabulary=vocabulary,
        directory=tmp_path / "the-target",
        metadata={},
    )


@pytest.fixture
def own(target):
    """Provides a draft's own parameters, and its sizes."""
    kept = {"encoder": range(target.config.num_encoder_layers), "decoder": LAYERS}
    params, config = keep_layers(target.params, target.config, **kept)
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape).astype("f"), params)
    return own_params(noisy), config


@pytest.fixture
def saved(own, target, tmp_path):
    save_shared_draft(tmp_path / "draft", *own, LAYERS, target, extra={"step": 7})
    return tmp_path / "draft"


def test_bfloat16_is_the_default_and_half_the_size(saved, own, target):
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(np.float32), own[0])
    loaded = load_shared_draft(saved, target).params
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
    size = sum(leaf.size for leaf in jax.tree.leaves(loaded))
    assert (saved / "draft.safetensors").stat().st_size < 2 * size + 5000
    assert json.loads((saved / "config.json").read_text())["step"] == 7


def test_drafts_of_another_target_are_refused(saved, target, random_params):
    def message(**changes):
        return message_of(load_shared_draft, saved, dataclasses.replace(target, **changes))

    wide = message(config=dataclasses.replace(target.config, emb_dim=24))
    assert f"16 and target {target.directory} has 24" in wide
    assert "give draft layers that were trained for this target" in wide
    assert "are for vocabulary" in message(vocabulary=ByteVocabulary())
    assert "are for decoder" in message(params=random_params(target.config, seed=1))


def test_another_target_is_recognized_before_its_weights_are_read(
    saved, target, random_params, tmp_path
):
    its, others = target.params, random_params(target.config, seed=1)
    for name, params in {"its": its, "other": others}.items():
        save_model(tmp_path / name, params, target.config, target.vocabulary)
    find_models(tmp_path / "its", [saved])
    message = message_of(find_models, tmp_path / "other", [saved])
    assert f"draft layers {saved} are for decoder" in message


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 2}, "has version 2, this spec_t5x reads 1"),
        ({"format": "spec_t5x"}, "has format 'spec_t5x', not 'spec_t5x_"),
        ({"target": None}, "are for vocabulary None"),
        ({"draft": None}, "describes no draft under 'draft' and 'layers'"),
        ({"tokens_known": "many"}, "describes no draft under 'draft' and 'layers'"),
        ({"tokens_known": 1e999}, "describes no draft under 'draft' and 'layers'"),
    ],
)
def test_what_is_damaged(saved, target, changes, expected):
    edit_config(saved, **changes)
    assert expected in message_of(load_shared_draft, saved, target)


def test_files_that_are_damaged_or_missing(saved, target):
    path = saved / "draft.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"cannot read the weights in {path}" in message_of(load_shared_draft, saved, target)
    (saved / "config.json").unlink()
    assert f"no file {saved / 'config.json'}" in message_of(load_shared_draft, saved, target)


def matrices(weights):
    """Returns the numbers of each matrix that a draft multiplies with, in the form that it has."""
    flat = flatten_dict(weights)
    return [jax.tree.leaves(leaf)[0] for path, leaf in flat.items() if path[-1] == "kernel"]


def test_a_narrow_head_is_kept(own, target, tmp_path):
    params, config = own
    whole = with_shared(params, target.params, LAYERS)
    head = NarrowHead.create(np.array([1, 2, 7, 40, 95]), 96)
    narrow = narrowed_params(params, whole, config, head.ids)
    directory = tmp_path / "narrow"
    options = {"head": head, "dtype": "float32"}
    save_shared_draft(directory, narrow, config, LAYERS, target, **options)
    loaded = load_shared_draft(directory, target)
    assert (loaded.config, loaded.layers) == (config, LAYERS)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, narrow)
    np.testing.assert_array_equal(loaded.head.ids, head.ids)
    model = bind(target.params, target.config)
    draft = make_draft(directory, target, model, DraftOptions(dtype="float32"))
    assert type(draft.model) is NarrowT5 and draft.vocab_size == 96
    rounded = make_draft(directory, target, model, DraftOptions(dtype="float32", weights="int8"))
    found = [*matrices(rounded.model.weights), *matrices({"kernel": rounded.model.kernel})]
    assert {str(each.dtype) for each in found} == {"int8"}
    message = message_of(save_shared_draft, tmp_path / "x", *own, LAYERS, target, head=head)
    assert "narrow_head/kernel" in message
    edit_config(directory, tokens_known=6)
    assert "is [16, 5], not [16, 6]" in message_of(load_shared_draft, directory, target)


def test_layers_are_loaded_as_the_type_of_their_target(saved, target):
    """The target may be loaded as another type than it was."""
    halved = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), target.params)
    config = dataclasses.replace(target.config, dtype="bfloat16")
    target = dataclasses.replace(target, config=config, params=halved)
    loaded = load_shared_draft(saved, target)
    assert loaded.config.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}


def test_a_directory_of_layers_is_a_draft(saved, target):
    model = bind(target.params, target.config)
    options = DraftOptions(settings=sampling(0.5), dtype="float32")
    draft = make_draft(saved, target, model, options)
    assert type(draft) is SharedEncoderDraft and draft.layers == LAYERS
    assert draft.settings == options.settings
    mixed = make_draft(f"mixed:{saved}", target, model)
    assert type(mixed) is MixedDraft and type(mixed.second) is SharedEncoderDraft
