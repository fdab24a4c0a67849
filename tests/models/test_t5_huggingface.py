"""The cached network and the loops give what transformers gives, token for token."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.models.attention import RelativeBias
from spec_t5x.sampling.distributions import sampling
from spec_t5x.types import EOS_ID
from tests.torch_t5 import SIZES, assert_same_logits, enlivened
from tests.toy_t5 import disturbed

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB_SIZE = 160
# T5 1.0 is ("relu", tied), T5 1.1 ("gated-gelu", untied).
VERSIONS = [("relu", True), ("gated-gelu", False), ("relu", False), ("gated-gelu", True)]
T5_1_0, T5_1_1 = VERSIONS[:2]
# umT5 is a T5 1.1 with a relative bias in every layer.
UMT5 = (*T5_1_1, "umt5")
NUM_NEW = 16
GAMMA = 3
# No token has this id: rows end at their limit alone.
NO_EOS = -1


def torch_model(activation: str, tied: bool, kind: str = "t5", *, seed: int):
    """Makes a tiny T5 whose weights are large enough to make its texts vary."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCAB_SIZE,
        **SIZES,
        # Of one number: generate of 5.23 makes its cache by that of the encoder.
        num_layers=2,
        num_decoder_layers=2,
        decoder_start_token_id=0,
        feed_forward_proj=activation,
        tie_word_embeddings=tied,
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    if not tied:
        # Version 5 ties every T5 that it builds.
        model.lm_head = torch.nn.Linear(config.d_model, VOCAB_SIZE, bias=False)
        model.all_tied_weights_keys = {}
        if kind == "umt5":
            # As released; version 5 rescales the logits of all.
            model.config.tie_word_embeddings = False
    return enlivened(model)


@pytest.fixture(scope="module")
def spiece(tmp_path_factory) -> Path:
    """Provides any SentencePiece model; the tests use ids."""
    words = ["zwölf", "Boxkämpfer", "jagen", "Viktor", "quer", "über", "den", "Sylter", "Deich"]
    lines = [" ".join(words[i:] + words[:i]) for i in range(len(words))] * 5
    return train_sentencepiece(lines, tmp_path_factory.mktemp("vocabulary") / "tiny", 40)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, spiece):
    """Provides ``pair(version, seed=0)``: a model of transformers, and the same loaded by us."""

    @functools.cache
    def make(version: tuple, seed: int = 0):
        theirs = torch_model(*version, seed=seed)
        directory = tmp_path_factory.mktemp("theirs")
        theirs.generation_config.eos_token_id = EOS_ID
        theirs.save_pretrained(directory)
        # Each test gives the token that ends a row.
        theirs.generation_config.eos_token_id = None
        (directory / "spiece.model").write_bytes(spiece.read_bytes())
        loaded = load(directory)
        # A T5 1.0 rescales its logits, which T5X knows for a tied embedding only.
        assert loaded.config.logits_via_embedding == version[1]
        return theirs, loaded

    return make


def sources(length: int) -> np.ndarray:
    """Returns four rows that end in EOS at several lengths, padded."""
    tokens = np.random.default_rng(length).integers(3, VOCAB_SIZE, (4, length))
    for row, end in enumerate((length, length // 2, length - 1, 4)):
        tokens[row, end - 1] = 1
        tokens[row, end:] = 0
    return tokens.astype(np.int32)


@pytest.mark.parametrize("version", [*VERSIONS, UMT5])
def test_teacher_forced_logits_equal_those_of_transformers(pair, version):
    """``test_cache.py`` compares them with cached ones."""
    theirs, loaded = pair(version)
    assert_same_logits(loaded, theirs)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (9, 12), (38, 256), (54, 512)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_distances_are_in_the_buckets_of_transformers(buckets, farthest, bidirectional):
    """In float64, one distance of each of the last two pairs would be in the bucket before."""
    positions = np.arange(2 * farthest)
    attention = transformers.models.t5.modeling_t5.T5Attention
    expected = attention._relative_position_bucket(
        torch.tensor(positions[None, :] - positions[:, None]), bidirectional, buckets, farthest
    )
    params = {"params": {"rel_embedding": np.arange(buckets, dtype=np.float32)[None]}}
    given = params, len(positions), bidirectional
    found = RelativeBias(1, buckets, farthest).apply(*given, method=RelativeBias.full)
    np.testing.assert_array_equal(found[0, 0], expected)


def their_text(theirs, tokens: np.ndarray, eos_id: int, prompts=None) -> np.ndarray:
    """Returns the tokens after start token and prompt, padded to ``NUM_NEW``."""
    start = np.zeros((len(tokens), 1), np.int64) if prompts is None else prompts
    generated = theirs.generate(
        torch.tensor(tokens).long(),
        attention_mask=torch.tensor(tokens != 0).long(),
        decoder_input_ids=torch.tensor(start).long(),
        do_sample=False,
        num_beams=1,
        max_new_tokens=NUM_NEW,
        eos_token_id=None if eos_id == NO_EOS else eos_id,
    ).numpy()[:, start.shape[1] :]
    return np.pad(generated, ((0, 0), (0, NUM_NEW - generated.shape[1])))


def end_token(text: np.ndarray) -> int:
    """Finds a token that ends some rows of a text early and is not in another one."""
    for token in np.unique(text):
        in_rows = (text == token).any(axis=1)
        early = (text[:, 1 : NUM_NEW // 2] == token).any()
        if token != 0 and early and not in_rows.all():
            return int(token)
    raise AssertionError("no such token: take another seed")


def decode_ours(model, draft, tokens, eos_id, prompts=None):
    """Decodes the sources by the plain loop (no draft) or the speculative one."""
    prompts = np.zeros((len(tokens), 1), np.int32) if prompts is None else prompts
    arguments = (tokens, prompts, jax.random.key(0), sampling(0.0))
    options = {
        "max_decode_len": prompts.shape[1] - 1 + NUM_NEW,
        "max_decode_steps": jnp.int32(NUM_NEW),
        "eos_id": eos_id,
    }
    if draft is None:
        return autoregressive_decode(model, *arguments, **options)
    return speculative_decode(model, TransformerDraft(draft), *arguments, gamma=GAMMA, **options)


@pytest.mark.parametrize("version", [T5_1_0, T5_1_1, UMT5], ids=["1.0", "1.1", "umt5"])
def test_greedy_text_equals_that_of_transformers(pair, version):
    """Decodes a padded batch by the plain loop, and with several drafts."""
    theirs, loaded = pair(version)
    ours, tokens = loaded.bind(), sources(14)
    endless = their_text(theirs, tokens, NO_EOS)
    assert len(np.unique(endless)) > 6
    eos_id = end_token(endless)
    expected = their_text(theirs, tokens, eos_id)
    # Some rows end by themselves, and some do not.
    assert (expected[:, -1] == 0).any() and (expected[:, -1] != 0).any()
    drafts = None, pair(version, seed=1)[1].bind(), disturbed(ours, 0.1), ours
    decoded = [decode_ours(ours, draft, tokens, eos_id) for draft in drafts]
    for each in decoded:
        np.testing.assert_array_equal(each.tokens[:, 0], expected)
    # Drafts were accepted and rejected, and never rejected if both models are the same.
    *_, similar, same = decoded
    assert 0 < int(similar.stats.accepted.sum()) < 3 / 4 * int(similar.lengths.sum())
    np.testing.assert_array_equal(same.stats.target_calls, -(-same.lengths // (GAMMA + 1)))


def test_text_after_forced_prompts_equals_that_of_transformers(pair):
    """Prompts of one batch have several lengths, and one holds the token that ends a row."""
    theirs, loaded = pair(T5_1_1)
    ours, tokens = loaded.bind(), sources(14)
    prompts = np.random.default_rng(5).integers(2, VOCAB_SIZE, (4, 4)).astype(np.int32)
    prompts[:, 0] = 0
    widths = (4, 2, 1, 3)
    for row, width in enumerate(widths):
        prompts[row, width:] = 0

    def their_texts(eos_id):
        """Decodes row by row, since transformers needs prompts of one length in a batch."""
        rows = zip(tokens, prompts, widths, strict=True)
        texts = [their_text(theirs, t[None], eos_id, p[None, :w])[0] for t, p, w in rows]
        return np.stack(texts)

    eos_id = end_token(their_texts(NO_EOS))
    prompts[0, 2] = eos_id
    expected = np.zeros((4, 3 + NUM_NEW), np.int64)
    for row, (width, text) in enumerate(zip(widths, their_texts(eos_id), strict=True)):
        expected[row, : width - 1 + NUM_NEW] = [*prompts[row, 1:width], *text]
    for draft in (None, disturbed(ours, 0.1)):
        decoded = decode_ours(ours, draft, tokens, eos_id, prompts)
        np.testing.assert_array_equal(decoded.tokens[:, 0], expected)
