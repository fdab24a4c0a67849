"""Keys of measured costs."""

import concurrent.futures
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.sampling.distributions import sampling
from spec_t5x.tuning import costs, store
from spec_t5x.tuning.store import code_digest, params_digest
from spec_t5x.verifiers import TokenVerifier
from tests.drafts import test_every_draft as every_draft
from tests.toy_t5 import disturbed, tiny_t5

# Bytes whose ids the tiny networks embed.
TEXT = "\x02\x03"


@pytest.mark.usefixtures("unchecked")
def test_a_digest_is_of_content_and_settings():
    model = tiny_t5(0)
    same = jax.tree.map(lambda leaf: jnp.array(leaf), model)
    assert params_digest(same) == params_digest(model)
    draft = TransformerDraft(model)
    others = [
        tiny_t5(1),
        tiny_t5(0, num_decoder_layers=2),
        disturbed(model, 1e-3),
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model),
        draft,
        TransformerDraft(model, settings=sampling(0.5)),
        CopyDraft(30),
        CopyDraft(31),
        None,
        *({"small": jnp.zeros(9).at[8].set(last)} for last in (0.0, 1.0)),
    ]
    assert len({params_digest(other) for other in [model, *others]}) == 1 + len(others)
    with pytest.raises(InputError, match="float among the parameters: give arrays"):
        params_digest({"scale": 0.5})


def test_costs_are_known_by_all_that_they_depend_on(monkeypatch):
    """Nothing is measured twice, and nothing is taken for something else."""
    keys = []
    monkeypatch.setattr(
        costs,
        "remembered",
        lambda key, measure, store: keys.append(json.dumps(key)) or measure()[0],
    )
    generator = Generator(
        target=tiny_t5(0),
        vocabulary=ByteVocabulary(),
        max_source_len=16,
        draft=TransformerDraft(tiny_t5(1)),
    )

    def key(which=generator, **changes):
        options = dataclasses.replace(GenerateOptions(), **changes)
        which = dataclasses.replace(which)
        which.engine(options).costs(text_batches(which, [TEXT], options)[0])
        return keys[-1]

    assert key(seed=3, truncate=True, temperature=0.0) == key()
    assert key(temperature=1.0) == key(temperature=0.5)
    # Each request to a service may have other numbers, which change no program's time.
    assert key(temperature=1.0, top_p=0.5) == key(temperature=0.5, top_p=0.6)
    assert key(temperature=1.0, top_k=4) == key(temperature=1.0, top_k=5)
    assert key(temperature=1.0, top_p=1.0) == key(temperature=1.0)
    assert key(repetition_penalty=1.5) == key(repetition_penalty=1.2) != key(repetition_penalty=1.0)
    different = [
        key(temperature=1.0),
        key(temperature=1.0, top_k=4),
        key(temperature=1.0, top_p=0.5),
        key(repetition_penalty=1.5),
        key(no_repeat_ngram_size=2),
        key(rescale_log_probs=True),
        key(batch_size=2),
        key(max_decode_len=64),
        key(temperature=1.0, num_decodes=2),
        key(verifier="token"),
        key(verifier="tree", widths=(2, 2)),
        key(generator.with_draft(CopyDraft(generator.target.vocab_size))),
        key(dataclasses.replace(generator, max_source_len=32)),
        key(dataclasses.replace(generator, target=tiny_t5(2))),
    ]
    before = key()
    # Options that no step's time depends on find the same costs without another digest.
    costed = dataclasses.replace(generator)
    batch, asked = text_batches(costed, [TEXT], GenerateOptions())[0], len(keys)
    for seed in range(3):
        costed.engine(GenerateOptions(temperature=1.0, seed=seed)).costs(batch)
    assert len(keys) == asked + 1
    assert len({before, *different}) == 1 + len(different)
    # Another program, as of another version of the package, and another machine.
    for part in ("_source", "machine"):
        with monkeypatch.context() as patch:
            patch.setattr(store, part, lambda: "another")
            assert key() not in (before, *different)


def test_threads_that_begin_together_measure_once(monkeypatch):
    measured = []

    def remembered(key, measure, store):
        measured.append(key)
        # Others get time to begin measuring, too.
        time.sleep(0.05)
        return measure()[0]

    monkeypatch.setattr(costs, "remembered", remembered)
    generator = Generator(
        target=tiny_t5(0),
        vocabulary=ByteVocabulary(),
        max_source_len=16,
        draft=CopyDraft(tiny_t5(0).vocab_size),
    )
    (batch,) = text_batches(generator, [TEXT], GenerateOptions())
    engine = generator.engine(GenerateOptions())
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = list(threads.map(engine.costs, [batch] * 3))
    assert len(measured) == 1 and found[0] == found[1] == found[2]


def test_code_outside_of_the_package_is_part_of_the_key(monkeypatch):
    """A changed draft of the same shapes is measured again, and a notebook's always."""
    ours, theirs = CopyDraft(30), every_draft.Parrot(jnp.array([3]), 30)
    inside = MixedDraft(ours, theirs)
    assert code_digest(ours) == code_digest(tiny_t5(0), ours, TokenVerifier())
    assert len({code_digest(ours), code_digest(theirs), code_digest(inside)}) == 2
    assert code_digest(theirs) == code_digest(theirs)
    # A class of a notebook has no file.
    monkeypatch.setattr(every_draft, "__file__", None)
    assert code_digest(inside) != code_digest(inside)


def test_settings_that_are_made_while_tracing_serve_later_calls():
    @jax.jit
    def traced(number):
        # No other test has this temperature.
        return number + GenerateOptions(temperature=0.7125).sampling().temperature

    traced(1.0)
    assert float(GenerateOptions(temperature=0.7125).sampling().temperature) == pytest.approx(
        0.7125
    )
