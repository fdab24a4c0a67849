"""Against T5X: what it saves is read without it, and what we write it restores.

For T5 1.0, 1.1 (and so Flan), mT5 with its rows, umT5, whose layers are scanned, and ByT5, tiny,
in both of T5X's formats: saved by T5X, converted in a process that cannot import it, compared with
T5X's own logits.
"""

import dataclasses
import functools
import json
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load
from spec_t5x.models.t5 import T5Config, Transformer
from tests.checkpoints.faults import with_sentinels
from tests.child import printed
from tests.torch_t5 import forward, logits_of

checkpoints = pytest.importorskip("t5x.checkpoints", reason="needs T5X")
torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

# Differences in float32 between implementations of one network.
TOLERANCE = 2e-4

SIZES = {
    "emb_dim": 16,
    "num_heads": 2,
    "head_dim": 8,
    "mlp_dim": 24,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
}
GATED = {"mlp_activations": ("gelu", "linear"), "logits_via_embedding": False}
CONFIGS = {
    "1.0": T5Config(**SIZES, vocab_size=256),
    "1.1": T5Config(**SIZES, **GATED, vocab_size=256),
    "mt5": T5Config(**{**SIZES, "emb_dim": 4, "mlp_dim": 8}, **GATED, vocab_size=250112),
    "umt5": T5Config(
        **{**SIZES, "num_decoder_layers": 3}, **GATED, vocab_size=256, relpos_per_layer=True
    ),
    "byt5": T5Config(**{**SIZES, "num_encoder_layers": 3}, **GATED, vocab_size=384),
}
VERSIONS = list(CONFIGS)
FORMATS = ["legacy", "orbax"]

# Each is converted to Hugging Face and back.
PROGRAM = """
import json, sys
sys.modules["t5x"] = None
from spec_t5x.checkpoints.convert import convert
for source, vocabulary, theirs, back, to in json.loads(sys.argv[1]):
    convert(source, theirs, to="huggingface", vocabulary=vocabulary)
    convert(theirs, back, to=to)
"""


@pytest.fixture(scope="module")
def params(random_params):
    """Weights of every version, the same for both formats."""
    return {version: random_params(config) for version, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def directories(tmp_path_factory, params, t5x_data, spiece) -> dict[tuple[str, str], Path]:
    """Provides each version in each format: ``saved`` by T5X, ``theirs`` and ``back`` converted."""
    root = tmp_path_factory.mktemp("t5x")
    vocabularies = {
        "1.0": str(spiece),
        "1.1": f"{spiece}:100",
        "mt5": str(with_sentinels(spiece, root / "mt5.model", 100)),
        "umt5": f"{spiece}:100",
        "byt5": "bytes",
    }
    save = {"legacy": t5x_data.save_legacy, "orbax": t5x_data.save_orbax}
    made, jobs = {}, []
    for version, config in CONFIGS.items():
        for kind in FORMATS:
            directory = made[version, kind] = root / version / kind
            save[kind](directory / "saved", params[version], config)
            paths = (directory / "theirs", directory / "back" / "checkpoint_7")
            to = "t5x_scanned" if version == "umt5" else "t5x"
            jobs.append([str(directory / "saved"), vocabularies[version], *map(str, paths), to])
    printed("-c", PROGRAM, json.dumps(jobs))
    return made


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    sources = rng.integers(2, 250, (2, 11)).astype(np.int32)
    targets = rng.integers(2, 250, (2, 7)).astype(np.int32)
    sources[1, 6:] = 0
    return sources, np.pad(targets, ((0, 0), (1, 0)))[:, :-1], targets


@pytest.fixture(scope="module")
def logits_of_t5x(params, t5x_data):
    """Provides the logits of T5X's network, on the weights it saved."""

    @functools.cache
    def compute(version: str) -> np.ndarray:
        module = t5x_data.t5x_network(CONFIGS[version])
        variables = {"params": t5x_data.as_t5x(params[version], CONFIGS[version])}
        # T5X's own code promotes ranks as it likes.
        with jax.numpy_rank_promotion("allow"):
            apply = jax.jit(functools.partial(module.apply, enable_dropout=False))
            return np.asarray(apply(variables, *batch()))

    return compute


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("version", VERSIONS)
def test_hugging_face_and_we_have_the_logits_of_t5x(directories, logits_of_t5x, version, kind):
    directory = directories[version, kind] / "theirs"
    expected = logits_of_t5x(version)
    sources, inputs, _ = batch()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    assert model.config.model_type == (version if version in ("mt5", "umt5") else "t5")
    # Version 5 rescales the logits of every umT5, in spite of its config.json.
    model.config.tie_word_embeddings = False
    theirs = logits_of(model, sources, sources != 0, inputs)
    np.testing.assert_allclose(theirs, expected, rtol=0, atol=TOLERANCE)
    loaded = load(directory)
    assert loaded.config == CONFIGS[version]
    ours = forward(loaded.config)({"params": loaded.params}, *batch())
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_dropout_of_equal_masks_gives_the_logits_of_t5x(params, t5x_data, version, monkeypatch):
    """Keys follow from the names of modules, so masks are made to follow from their shapes."""
    config, shapes = CONFIGS[version], {}

    def mask(key, p, shape):
        shapes[module].append(shape)
        seed = zlib.crc32(str(shape).encode())
        return jax.numpy.asarray(np.random.default_rng(seed).random(shape) < p)

    monkeypatch.setattr(jax.random, "bernoulli", mask)
    with jax.numpy_rank_promotion("allow"):
        logits = []
        for module in (t5x_data.t5x_network(config), Transformer(config)):
            shapes[module] = []
            variables, rngs = {"params": params[version]}, {"dropout": jax.random.key(0)}
            logits.append(module.apply(variables, *batch(), enable_dropout=True, rngs=rngs))
    np.testing.assert_allclose(*logits, rtol=0, atol=TOLERANCE)
    theirs, ours = shapes.values()
    assert theirs == ours and len(ours) == 18


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_weights_come_back_bit_for_bit(directories, params, version, kind):
    loaded = load(directories[version, kind] / "back")
    assert loaded.config == CONFIGS[version]
    assert loaded.metadata["step"] == 7
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params[version])


@pytest.mark.parametrize("version", VERSIONS)
def test_t5x_restores_what_we_write(directories, params, t5x_data, version):
    back = directories[version, "legacy"] / "back" / "checkpoint_7"
    expected = flatten_dict(t5x_data.as_t5x(params[version], CONFIGS[version]), sep="/")
    tree = checkpoints.load_t5x_checkpoint(str(back))
    assert int(tree["state"]["step"]) == 7
    restored = t5x_data.restore(back, CONFIGS[version])
    assert int(restored.step) == 7
    for found in (tree["target"], dict(restored.params)):
        flat = flatten_dict(found, sep="/")
        assert set(flat) == set(expected)
        for path, leaf in flat.items():
            np.testing.assert_array_equal(np.asarray(leaf), expected[path])


def test_a_bias_that_layers_share_is_scanned_as_each_ones(tmp_path, params, t5x_data, spiece):
    """A T5 1.1 for ``scalable_t5``, which has the same logits."""
    config, directory = CONFIGS["1.1"], tmp_path / "model"
    source = t5x_data.save_legacy(directory, params["1.1"], config)
    written = tmp_path / "scanned" / "checkpoint_7"
    convert(source, written, to="t5x_scanned", vocabulary=f"{spiece}:100")
    scanned = dataclasses.replace(config, relpos_per_layer=True)
    restored = t5x_data.restore(written, scanned)
    module = t5x_data.t5x_network(scanned)
    with jax.numpy_rank_promotion("allow"):
        theirs = module.apply({"params": restored.params}, *batch(), enable_dropout=False)
    ours = forward(config)({"params": params["1.1"]}, *batch())
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=TOLERANCE)
