"""Every draft by its name: its parameters are arguments of T5X's program, the text is T5X's."""

import functools
import re

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import seqio
from flax.core import unfreeze
from flax.linen.partitioning import get_axis_names
from jax.sharding import PartitionSpec
from t5x import decoding, models, partitioning

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.storage.locations import GcsPath
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.drafts import NamedDraft, as_vocabulary
from spec_t5x.t5x_plugin.speculation import speculate
from spec_t5x.t5x_plugin.speculative_model import DRAFT
from tests.named_drafts import every_named_draft, named
from tests.t5x_plugin.toy_models import t5x_network

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

GREEDY = {"temperature": 0.0, "topk": 0}
BATCH = {
    "encoder_input_tokens": jnp.array([[50, 7, 80, 1], [9, 31, 1, 0], [66, 1, 0, 0]]),
    "decoder_input_tokens": jnp.zeros((3, 12), jnp.int32),
}


@pytest.fixture(scope="module")
def stock(drafts_of_pair):
    """Provides the pair's target as T5X's model, its parameters, and its texts."""
    loaded = load(drafts_of_pair / "target")
    spiece = drafts_of_pair / "target" / "spiece.model"
    vocabulary = seqio.SentencePieceVocabulary(str(spiece), extra_ids=0)
    model = models.EncoderDecoderModel(
        module=t5x_network(loaded.config),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=None,
        decode_fn=decoding.temperature_sample,
    )
    params = unfreeze(loaded.params)
    texts = predict(model, params).lower().compile()(params)
    assert len(np.unique(texts, axis=0)) == len(texts)
    return model, params, texts


def texts_of(model, params):
    return model.predict_batch_with_aux(params, BATCH, decoder_params=dict(GREEDY))[0]


def predict(model, params):
    """Returns the program of a batch, traced as T5X traces it."""
    return jax.jit(functools.partial(texts_of, model)).trace(params)


def speculative(stock, name, **options):
    """Returns the model with a draft, the shapes that T5X sees, and all parameters."""
    model = speculate(stock[0], NamedDraft(name=name, in_tree=True, **options), gamma=2)
    shapes = {name: tokens.shape for name, tokens in BATCH.items()}
    variables = jax.eval_shape(
        lambda rng: model.get_initial_variables(rng, shapes), jax.random.key(0)
    )
    params = dict(stock[1])
    if DRAFT in variables["params"]:
        params[DRAFT] = model.read_draft(stock[1])
    return model, variables, params


@every_named_draft
def test_the_text_is_t5xs_and_the_program_holds_no_parameters(draft, stock, drafts_of_pair):
    model, variables, params = speculative(stock, named(draft, drafts_of_pair))
    # What T5X partitions by.
    axes = unfreeze(get_axis_names(variables["params_axes"]))
    ranks = jax.tree.map(len, axes, is_leaf=lambda node: isinstance(node, PartitionSpec))
    assert ranks == jax.tree.map(jnp.ndim, params)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), unfreeze(variables["params"]))
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)

    lowered = predict(model, params).lower()
    constants = re.findall(r'dense<"0x([0-9A-F]+)"', lowered.as_text())
    assert max(map(len, constants), default=0) < 2 * 256
    np.testing.assert_array_equal(lowered.compile()(params), stock[2])


@pytest.mark.parametrize("draft", ["eagle:{}/eagle", "early_exit:1", "mixed:int8"])
def test_an_export_has_neither_kernels_nor_layouts(draft, stock, drafts_of_pair):
    """T5X exports on a mesh, where sampling has none either."""
    model, _, params = speculative(stock, draft.format(drafts_of_pair), kernels=False)
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    texts = functools.partial(texts_of, model)
    texts = partitioner.partition(texts, in_axis_resources=(None,), out_axis_resources=None)
    exported = jax.export.export(jax.jit(texts))(params)
    np.testing.assert_array_equal(exported.call(params), stock[2])


def test_a_draft_of_another_target_is_refused_where_there_are_parameters(stock, drafts_of_pair):
    model, _, _ = speculative(stock, f"eagle:{drafts_of_pair}/eagle")
    scaled = jax.tree.map(lambda leaf: 2 * leaf, stock[1])
    with pytest.raises(InputError, match="are for decoder .* give draft layers that were"):
        model.read_draft(scaled)


def test_parameters_that_are_not_in_the_tree_become_no_constants(stock, drafts_of_pair):
    model, _, _ = speculative(stock, f"{drafts_of_pair}/narrow")
    with pytest.raises(InputError, match="the model's tree has no draft/model/weights/"):
        predict(model, stock[1])


def test_a_vocabulary_in_a_bucket(drafts_of_pair, tmp_path, monkeypatch):
    """T5X's own gin files name one."""
    spiece = drafts_of_pair / "target" / "spiece.model"
    held = {"gs://bucket/vocabs/spiece.model": spiece.read_bytes()}
    monkeypatch.setattr(GcsPath, "_read", lambda path: held.get(str(path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = as_vocabulary(seqio.SentencePieceVocabulary(*held, extra_ids=3))
    assert found.fingerprint() == SentencePieceVocabulary(spiece, 3).fingerprint()
    with pytest.raises(InputError, match="no vocabulary at gs://bucket/a.model"):
        as_vocabulary(seqio.SentencePieceVocabulary("gs://bucket/a.model"))


def test_vocabularies_of_seqio():
    found = as_vocabulary(seqio.ByteVocabulary(extra_ids=5))
    assert found.fingerprint() == ByteVocabulary(5).fingerprint()
    assert found.fingerprint() != ByteVocabulary(6).fingerprint()
    with pytest.raises(InputError, match="is a PassThroughVocabulary: a draft by name needs Sent"):
        as_vocabulary(seqio.PassThroughVocabulary(size=9))
