"""Keys of measured costs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.sampling.distributions import sampling
from spec_t5x.tuning import costs, identity
from spec_t5x.tuning.identity import params_digest
from tests.toy_t5 import disturbed, tiny_t5


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
    ]
    assert len({params_digest(other) for other in [model, *others]}) == 1 + len(others)
    with pytest.raises(InputError, match="float among the parameters: give arrays"):
        params_digest({"scale": 0.5})


def test_costs_are_known_by_all_that_they_depend_on(monkeypatch):
    """Nothing is measured twice, and nothing is taken for something else."""
    keys = []
    monkeypatch.setattr(
        costs, "remembered", lambda key, measure, store: keys.append(json.dumps(key)) or measure()
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
        which.engine(options).costs(which.batches(["ab"], options)[0])
        return keys[-1]

    assert key(seed=3, truncate=True, temperature=0.0) == key()
    assert key(temperature=1.0) == key(temperature=0.5)
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
    assert len({before, *different}) == 1 + len(different)
    # Another program, as of another version of the package.
    monkeypatch.setattr(identity, "_source", lambda: "changed")
    assert key() not in (before, *different)
