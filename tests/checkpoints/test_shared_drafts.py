"""Drafts without an encoder on disk: read back as written, and only for their target."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.make_draft import DraftOptions, make_draft
from spec_t5x.checkpoints.own.native import save_model
from spec_t5x.checkpoints.own.shared_drafts import load_shared_draft, save_shared_draft
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.drafts.stopping import Stopping
from spec_t5x.errors import InputError
from spec_t5x.models.binding import bind
from spec_t5x.models.kept_layers import keep_layers, own_params, with_shared
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5, narrowed_params
from spec_t5x.sampling.distributions import sampling

LAYERS = (0, 2)


@pytest.fixture(params=["1.0", "1.1"])
def target(request, configs, random_params, vocabulary, tmp_path):
    config = dataclasses.replace(configs[request.param], num_decoder_layers=3)
    return LoadedModel(
        params=random_params(config),
        config=config,
        vocabulary=vocabulary,
        directory=tmp_path / "the-target",
        metadata={},
    )


def make_own(target, seed=0):
    kept = {"encoder": range(target.config.num_encoder_layers), "decoder": LAYERS}
    params, config = keep_layers(target.params, target.config, **kept)
    rng = np.random.default_rng(seed)
    noisy = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape).astype("f"), params)
    return own_params(noisy), config


@pytest.fixture
def saved(target, tmp_path):
    own, config = make_own(target)
    save_shared_draft(tmp_path / "draft", own, config, LAYERS, target, extra={"step": 7})
    return tmp_path / "draft"


def message_of(function, *args, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_float32_round_trip_is_exact(target, tmp_path):
    own, config = make_own(target)
    save_shared_draft(tmp_path / "exact", own, config, LAYERS, target, dtype="float32")
    loaded = load_shared_draft(tmp_path / "exact", target)
    assert (loaded.config, loaded.layers) == (config, LAYERS)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, own)


def test_bfloat16_is_the_default_and_the_encoder_is_not_there(saved, target):
    own, _ = make_own(target)
    loaded = load_shared_draft(saved, target)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(
            ours, theirs.astype(jnp.bfloat16).astype(np.float32)
        ),
        loaded.params,
        own,
    )
    num_own = sum(leaf.size for leaf in jax.tree.leaves(own))
    assert (saved / "draft.safetensors").stat().st_size < 2 * num_own + 5000
    assert num_own < 0.7 * target.num_params
    assert loaded.metadata["step"] == 7 and loaded.directory == saved


def test_a_narrow_head_is_kept(target, tmp_path):
    own, config = make_own(target)
    whole = with_shared(own, target.params, LAYERS)
    head = NarrowHead.create(np.array([1, 2, 7, 40, 95]), 96)
    narrow = narrowed_params(own, whole, config, head.ids)
    directory = tmp_path / "narrow"
    options = {"head": head, "dtype": "float32"}
    save_shared_draft(directory, narrow, config, LAYERS, target, **options)
    loaded = load_shared_draft(directory, target)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, narrow)
    np.testing.assert_array_equal(loaded.head.ids, head.ids)
    model = bind(target.params, target.config)
    draft = make_draft(directory, target, model, DraftOptions(dtype="float32"))
    assert type(draft.draft.model) is NarrowT5 and draft.vocab_size == 96
    message = message_of(save_shared_draft, tmp_path / "x", own, config, LAYERS, target, head=head)
    assert "narrow_head/kernel" in message
    edit_config(directory, tokens_known=6)
    assert "is [16, 5], not [16, 6]" in message_of(load_shared_draft, directory, target)


def test_it_is_loaded_as_the_type_of_its_target(saved, target):
    halved = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), target.params)
    config = dataclasses.replace(target.config, dtype="bfloat16")
    loaded = load_shared_draft(saved, dataclasses.replace(target, params=halved, config=config))
    assert loaded.config.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}


def test_its_directory_is_a_draft(saved, target, tmp_path):
    model = bind(target.params, target.config)
    options = DraftOptions(settings=sampling(0.5), stopping=Stopping(c=0.1), dtype="float32")
    draft = make_draft(saved, target, model, options)
    assert type(draft) is SharedEncoderDraft and draft.layers == LAYERS
    assert (draft.draft.settings, draft.draft.stopping) == (options.settings, options.stopping)
    mixed = make_draft(f"mixed:{saved}", target, model)
    assert type(mixed) is MixedDraft and type(mixed.second) is SharedEncoderDraft
    save_model(tmp_path / "middle", target.params, target.config, target.vocabulary)
    text = f"cascade:{tmp_path / 'middle'},{saved}"
    assert "in a cascade it would draft for" in message_of(make_draft, text, target, model)


@pytest.mark.parametrize(("name", "value"), [("emb_dim", 24), ("num_heads", 4), ("mlp_dim", 25)])
def test_drafts_of_other_sizes(saved, target, name, value):
    config = dataclasses.replace(target.config, **{name: value})
    message = message_of(load_shared_draft, saved, dataclasses.replace(target, config=config))
    assert f"{saved} are for {name} {getattr(target.config, name)} and" in message
    assert f"has {value}: give draft layers that were trained for this target" in message


def test_drafts_of_another_target_of_the_same_sizes(saved, target, random_params):
    other = dataclasses.replace(target, params=random_params(target.config, seed=1))
    assert "are for decoder" in message_of(load_shared_draft, saved, other)
    other = dataclasses.replace(target, vocabulary=ByteVocabulary())
    assert "are for vocabulary" in message_of(load_shared_draft, saved, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "spec_t5x"}, "has format 'spec_t5x', not 'spec_t5x_shared_draft'"),
        ({"version": 2}, "has version 2, this spec_t5x reads 1"),
        ({"draft": None}, "describes no draft under 'draft' and 'layers'"),
        ({"draft": {"emb_dim": 0}}, "describes no draft under 'draft' and 'layers'"),
        ({"tokens_known": "many"}, "describes no draft under 'draft' and 'layers'"),
        ({"layers": 3}, "describes no draft under 'draft' and 'layers'"),
        ({"target": None}, "are for vocabulary None"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_damaged_config(saved, target, changes, message):
    edit_config(saved, **changes)
    assert message in message_of(load_shared_draft, saved, target)


def test_damaged_weights(saved, target):
    weights = saved / "draft.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"cannot read the weights in {weights}" in message_of(load_shared_draft, saved, target)
    weights.unlink()
    assert f"no file {weights}" in message_of(load_shared_draft, saved, target)


def test_what_is_not_saved(saved, target, tmp_path):
    own, config = make_own(target)
    destination = tmp_path / "new"

    def message(params=own, config=config, where=destination, **options):
        return message_of(save_shared_draft, where, params, config, LAYERS, target, **options)

    broken = jax.tree.map(lambda leaf: np.where(leaf == leaf.max(), np.nan, leaf), own)
    assert "NaN or infinite" in message(params=broken)
    assert "decoder/layers_2" in message(config=dataclasses.replace(config, num_decoder_layers=3))
    assert "choose bfloat16 or float32" in message(dtype="float16")
    assert "extra entry 'layers'" in message(extra={"layers": 1})
    assert not destination.exists()
    assert "overwrite=True" in message(where=saved)
