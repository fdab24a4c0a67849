"""Tests of heads as the draft: the target's text and law, from the right states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.contrib.medusa.draft import MedusaDraft
from spec_t5x.contrib.medusa.network import T5Heads
from spec_t5x.errors import InputError
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode, speculative_steps
from spec_t5x.sampling.distributions import argmax, sampling
from spec_t5x.verifiers import TreeVerifier
from tests.loops import test_laws_against_transformers as theirs
from tests.loops import test_ruled
from tests.loops.stubs import assert_same_decodes
from tests.loops.test_laws_against_transformers import laws, small_models  # noqa: F401
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = sampling(0.0)
KEY = jax.random.key(0)
LENGTH = 16
SOURCES = jnp.asarray(np.random.default_rng(0).integers(2, 30, (5, 7)), jnp.int32)
SOURCES = SOURCES.at[1, 4:].set(0).at[4, 2:].set(0)
PROMPTS = jnp.array([[0, 0, 0, 0], [0, 5, 9, 0], [0, 1, 0, 0], [0, 3, 1, 4], [0, 7, 0, 0]])
PROMPT_LENGTHS = np.array([0, 2, 1, 3, 1])
ARGUMENTS = SOURCES, PROMPTS, KEY, GREEDY


@functools.cache
def target():
    return tiny_t5(0)


def random_heads(num_heads=3, model=None):
    """Makes heads that change the target's predictions a little."""
    model = model or target()
    rng, width = np.random.default_rng(0), model.config.emb_dim
    shapes = {"wi": (num_heads, 2 * width, 12), "wo": (num_heads, 12, width)}
    params = {n: rng.normal(scale=0.3, size=s).astype(np.float32) for n, s in shapes.items()}
    return MedusaDraft(T5Heads.create(params, model))


@jax.jit
def states_of(prefixes):
    """Returns the target's states of whole texts, teacher-forced, without a cache."""

    def read(network):
        text = jnp.ones_like(prefixes)
        return network.decode_states(network.encode(SOURCES), SOURCES, prefixes, text)

    return target().module.apply({"params": target().params}, method=read)


def test_greedy_text_is_that_of_plain_decoding():
    limits = jnp.array([16, 9, 7, 0, 12])
    options = {"max_decode_len": LENGTH, "max_decode_steps": limits, "rescale_log_probs": False}
    expected = autoregressive_decode(target(), *ARGUMENTS, **options)
    draft = random_heads(num_heads=4)
    decoded = speculative_decode(target(), draft, *ARGUMENTS, gamma=5, **options)
    assert_same_decodes(decoded, expected)
    row = decoded.stats
    # Nothing in the first iteration, then a token of each head.
    iterations = np.maximum(np.asarray(row.target_calls) - 1, 0)
    np.testing.assert_array_equal(row.proposed, 4 * iterations)
    assert row.accepted_by_position.shape[-1] == 5
    assert not np.any(np.asarray(row.accepted_by_position)[..., 4:])


@pytest.mark.parametrize("paced", [False, True])
def test_proposals_come_from_the_states_of_the_text_so_far(paced):
    """Tokens before were accepted, rejected or, at a pace, written by plain steps."""
    gamma, draft = 3, random_heads(num_heads=3)
    # The heads read the last layer's states, whichever others the target shows beside them.
    model = target().showing((0,)) if paced else target()
    costly = Pace.start(Costs.by_formula(c=0.6, largest=3), rest=2) if paced else None
    options = {"gamma": gamma, "max_decode_len": LENGTH, "pace": costly}
    iterations = list(speculative_steps(model, draft, *ARGUMENTS, **options))
    plain_steps = [not np.any(iteration.num_proposed) for iteration in iterations[1:]]
    assert any(plain_steps) == paced
    if paced:
        # Proposals are made again after plain steps.
        assert not all(plain_steps[plain_steps.index(True) :])
    texts = [
        row[1 : 1 + length].tolist() for row, length in zip(PROMPTS, PROMPT_LENGTHS, strict=True)
    ]
    accepted, compared = 0, 0
    ended = np.zeros(5, bool)
    for number, iteration in enumerate(iterations):
        prefixes = np.zeros((5, LENGTH + gamma + 2), np.int32)
        for row, text in enumerate(texts):
            prefixes[row, 1 : 1 + len(text)] = text
        states = states_of(jnp.asarray(prefixes))
        for row in np.flatnonzero(~np.asarray(ended)):
            text = texts[row]
            proposes = number > 0 and not plain_steps[number - 1]
            proposed = int(iteration.num_proposed[row])
            assert proposed in ((range(1, gamma + 1) if paced else (gamma,)) if proposes else (0,))
            if proposes:
                # The state that the last token was predicted from, and that token.
                last = states[row, len(text) - 1][None], jnp.array(text[-1:])
                expected = argmax(draft.heads.head_logits(*last, gamma))[0, :proposed]
                np.testing.assert_array_equal(iteration.proposed[row, :proposed], expected)
                compared += 1
            appended = iteration.appended[row, : iteration.num_appended[row]]
            texts[row] = [*text, *appended.tolist()]
        accepted += int(iteration.num_accepted.sum())
        ended = iteration.ended
    assert compared > 10 and accepted > 0


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            lambda: TableTarget.create(seed=0, vocab_size=30),
            {},
            "is a TableTarget with sta",
        ),
        (lambda: tiny_t5(0, emb_dim=24), {}, "of width 16 and the target is a T5Model with sta"),
        (target, {"verifier": TreeVerifier((2,))}, "MedusaDraft has no propose_tree"),
    ],
    ids=["a target without states", "another width", "a tree"],
)
def test_impossible_combinations_are_refused(model, options, message):
    options = {"gamma": 2, "max_decode_len": LENGTH, **options}
    with pytest.raises(InputError, match=message):
        speculative_decode(model(), random_heads(), *ARGUMENTS, **options)


@pytest.mark.usefixtures("unchecked")
@test_ruled.every_rule
def test_rules_of_decoding_are_kept(name, monkeypatch):
    make = lambda: random_heads(model=test_ruled.target())  # noqa: E731
    monkeypatch.setitem(test_ruled.DRAFTS, "medusa", make)
    test_ruled.test_the_text_is_that_of_plain_decoding("medusa", name, "block")


@pytest.mark.usefixtures("unchecked", "small_models")
def test_texts_follow_the_law_of_transformers(laws, monkeypatch):  # noqa: F811
    make = lambda: random_heads(model=theirs.target())  # noqa: E731
    monkeypatch.setitem(theirs.DRAFTS, "medusa", make)
    theirs.test_texts_follow_the_law_of_transformers(laws, "medusa", "block")


def test_it_is_made_by_its_name_for_an_encoder_decoder(tiny_pair):
    loaded = load(tiny_pair / "target")
    with pytest.raises(InputError, match="draft 'medusa' is not packaged for .*: give medusa:DIR"):
        make_draft("medusa", loaded, loaded.bind())
