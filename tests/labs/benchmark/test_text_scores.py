"""Acceptance at every place of the target's texts: against exact laws, and for every draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark.text_scores import score_texts
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.labs.theory import formulas
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import row_keys
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import sampling, standardize
from spec_t5x.types import EOS_ID
from tests.toy_drafts import ConstantDraft, TableDraft, tiny_head
from tests.toy_t5 import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, LENGTH = 5, 9
SOURCES = jnp.asarray([[2, 3], [3, 0], [4, 4]], jnp.int32)
PROMPTS = jnp.asarray([[0, 2, 3], [0, 0, 0], [0, 4, 0]], jnp.int32)
PROMPT_LENGTHS = np.array([2, 0, 1])
KEYS = row_keys(jax.random.key(0), 3)
LENIENCES = (1.0, 0.3)


def generated(target, sources, prompts, settings) -> np.ndarray:
    """Generates the texts that ``score_texts`` scores, which no token ends, from ``KEYS``."""
    decoded = autoregressive_decode(
        target, sources, prompts, KEYS, settings, max_decode_len=LENGTH, eos_id=-1
    )
    assert np.asarray(decoded.lengths).ravel().tolist() == [LENGTH] * 3
    return np.array(decoded.tokens[:, 0])


@pytest.fixture(scope="module")
def toy():
    """Provides a target and drafts that are known at every prefix."""
    drafts = {
        "table": TableDraft.create(1, VOCAB, zeros=0.2),
        "token 3": ConstantDraft(jnp.int32(3), VOCAB),
        "uniform": UniformDraft(VOCAB),
    }
    return TableTarget.create(0, VOCAB, zeros=0.2), drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["argmax", "sampling"])
def test_betas_are_those_of_the_exact_distributions(toy, temperature):
    """Prompts have different lengths, and their tokens are not scored."""
    target, drafts = toy
    settings = sampling(temperature)
    options = {"max_decode_len": LENGTH, "leniences": LENIENCES, "eos_id": -1}
    scores = score_texts(target, drafts, SOURCES, PROMPTS, KEYS, settings, **options)
    tokens = generated(target, SOURCES, PROMPTS, settings)
    # Exact, from whole prefixes, without caches.
    prefixes = jnp.pad(tokens, ((0, 0), (1, 0)))
    logits = target.next_logits(SOURCES, prefixes)
    p, own = (standardize(logits, how) for how in (settings, sampling(1.0)))
    of_table = TableTarget(drafts["table"].table).next_logits(SOURCES, prefixes)
    exact = {
        "table": standardize(of_table, settings),
        "token 3": jnp.broadcast_to(jax.nn.one_hot(3, VOCAB), p.shape),
        "uniform": jnp.full(p.shape, 1 / VOCAB),
    }
    written = np.arange(LENGTH) < LENGTH - PROMPT_LENGTHS[:, None]
    assert (np.asarray(scores.written) == written).all()
    for name, q in exact.items():
        lenient = formulas.beta(p, q, 0.3)
        if temperature == 0:
            lenient = formulas.beta_of_lenient_argmax(own, q, 0.3)
        for expected, found in zip((formulas.beta(p, q), lenient), scores.betas[name], strict=True):
            for row, start in enumerate(PROMPT_LENGTHS):
                ours = np.asarray(found[row, : LENGTH - start])
                np.testing.assert_allclose(ours, expected[row, start:LENGTH], atol=1e-5)
        assert (np.asarray(scores.proposed[name]) == written).all()
    if temperature == 0:
        return
    # The same texts, given, and cut by an end of sequence.
    tokens[:, 3] = EOS_ID
    short = score_texts(
        target, drafts, SOURCES, PROMPTS, KEYS, settings, texts=tokens, **options | {"eos_id": 1}
    )
    assert np.asarray(short.written).sum(axis=1).tolist() == (4 - PROMPT_LENGTHS).tolist()
    first, whole = (np.asarray(each.betas["table"][..., :1]) for each in (short, scores))
    np.testing.assert_allclose(first, whole, atol=1e-6)


@pytest.fixture(scope="module")
def scored():
    """Provides scores of a small T5's drafts, and where its texts have tokens."""
    target = tiny_t5(0, num_decoder_layers=2)
    sources = jnp.asarray([[5, 6, 7, 1], [8, 9, 1, 0], [3, 4, 5, 1]], jnp.int32)
    network, copy = TransformerDraft(disturbed(target, 0.1)), CopyDraft(target.vocab_size)
    early = SelfDraft.early_exit(target, 1)
    # The target's first layer as a separate network.
    params = early.model.params | {"encoder": target.params["encoder"]}
    drafts = {
        "network": network,
        "own": network.replace(settings=sampling(0.7)),
        "early": early,
        "first layer": TransformerDraft(T5Model(params, early.model.module)),
        "copy": copy,
        "mixed": MixedDraft(copy, network),
    }
    prompts = jnp.zeros((3, 1), jnp.int32)
    scores = score_texts(target, drafts, sources, prompts, KEYS, sampling(1.0), max_decode_len=12)
    return scores, np.asarray(scores.written)


def places(scores, name) -> np.ndarray:
    return np.asarray(scores.betas[name][0])[np.asarray(scores.written)]


def test_each_draft_proposes_in_its_own_way(scored):
    scores, written = scored
    for name in ("network", "own", "mixed"):
        assert (np.asarray(scores.proposed[name]) == written).all()
    betas = places(scores, "network")
    assert 0.1 < betas.mean() < 0.99
    assert not np.allclose(betas, places(scores, "own"), atol=0.01)
    # A draft that reads the target's cache has it as in decoding.
    expected = places(scores, "first layer")
    np.testing.assert_allclose(places(scores, "early"), expected, atol=1e-4)
    assert expected.mean() < 0.99
    # Mixed copies where it can, and asks the network elsewhere.
    copied = np.asarray(scores.proposed["copy"])
    assert 0 < copied.sum() < written.sum() and not copied[~written].any()
    expected = np.where(copied, scores.betas["copy"][0], scores.betas["network"][0])
    np.testing.assert_allclose(places(scores, "mixed"), expected[written], atol=1e-4)


def test_drafts_read_the_first_of_the_layers_that_another_reads():
    target = tiny_t5(0, num_decoder_layers=2)
    depths = {"none": (), "first": (0,), "second": (1,)}
    drafts = {
        name: EagleDraft.create(*tiny_head(target, (1,), 12, wanted), (1,), target)
        for name, wanted in depths.items()
    }

    def betas(*names):
        given = {name: drafts[name] for name in names}
        options = {"max_decode_len": LENGTH, "eos_id": -1}
        arguments = target, given, SOURCES, PROMPTS, KEYS, sampling(1.0)
        return score_texts(*arguments, **options).betas

    together = betas("first", "none")
    for name, found in together.items():
        np.testing.assert_allclose(found, betas(name)[name], atol=1e-5)
    assert np.abs(together["first"] - together["none"]).max() > 0.01
    with pytest.raises(InputError, match=r"draft second reads the target's layers \[1\]"):
        betas("first", "second")
