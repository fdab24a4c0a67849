"""What a finding holds for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.stopping import Stopping
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.testing.toy_models import disturbed, tiny_t5
from spec_t5x.tuning.identity import fingerprint, identity, machine


def test_a_fingerprint_is_of_content_and_settings():
    model = tiny_t5(0)
    same = jax.tree.map(lambda leaf: jnp.array(leaf), model)
    assert fingerprint(same) == fingerprint(model)
    draft = TransformerDraft(model)
    others = [
        tiny_t5(1),
        tiny_t5(0, num_decoder_layers=2),
        disturbed(model, 1e-3),
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model),
        draft,
        TransformerDraft(model, stopping=Stopping(c=0.1)),
        TransformerDraft(model, stopping=Stopping(c=0.2)),
        CopyDraft(30),
        CopyDraft(31),
        None,
    ]
    assert len({fingerprint(other) for other in [model, *others]}) == 1 + len(others)


def test_an_identity_is_of_all_that_time_and_acceptance_depend_on():
    generator = Generator(
        target=tiny_t5(0),
        vocabulary=ByteVocabulary(),
        max_source_len=16,
        draft=TransformerDraft(tiny_t5(1)),
    )
    options = GenerateOptions()

    def key(which=generator, **changes):
        return json.dumps(identity(which, dataclasses.replace(options, **changes)), sort_keys=True)

    assert key(gamma="auto", seed=3, guard=True) == key()
    different = [
        key(temperature=1.0),
        key(temperature=1.0, top_k=4),
        key(batch_size=2),
        key(max_decode_len=64),
        key(num_decodes=2),
        key(verifier="token"),
        key(verifier="tree", widths=(2, 2)),
        key(generator.plain()),
        key(dataclasses.replace(generator, max_source_len=32)),
        key(dataclasses.replace(generator, target=tiny_t5(2))),
    ]
    assert len({key(), *different}) == 1 + len(different)


@pytest.mark.parametrize("name", ["platform", "num_devices", "processor", "threads", "jax"])
def test_the_machine_is_part_of_it(name):
    assert machine()[name]
