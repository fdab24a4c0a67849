"""The loops compiled for a TPU v4, without one, copy no cache."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.labs.tpu import chips
from spec_t5x.loops import refill
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA
from spec_t5x.models.partitioning import make_mesh, partitioned, replicated
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.models.weights import map_forms
from tests.loops.compiled_loops import cache_copies, loop_instructions
from tests.loops.test_compiled_loops import GAMMA, MAX_DECODE_LEN, TREE, check, rows
from tests.named_drafts import named
from tests.toy_t5 import tiny_t5

# Arguments are shapes in place of arrays.
pytestmark = pytest.mark.usefixtures("unchecked_module")


# Drafts that keep a cache, read the target's or write to it, or vary.
@pytest.mark.parametrize("draft", ["{}/draft", "early_exit:1", "mixed:{}/shared"])
def test_drafts(draft, target_of_drafts, v4):
    loaded, target, directory = target_of_drafts
    made = make_draft(named(draft, directory), loaded, target)
    # At gamma 1 fewer programs for blocks of some length; a fixed gamma needs its own loop.
    gamma = 1 if made.traits.varies else GAMMA
    check(on_tpu(v4, target, made, gamma=gamma), target.config, 2, gamma + 1)


def test_trees(v4):
    # Caches of a common size: XLA lays out toys differently.
    sizes = {
        "emb_dim": 1024,
        "mlp_dim": 1024,
        "num_heads": 16,
        "head_dim": 64,
        "num_decoder_layers": 1,
    }
    target = tiny_t5(0, **sizes)
    draft = TransformerDraft(tiny_t5(1, **sizes))
    program = on_tpu(v4, target, draft, verifier=TREE, max_decode_len=117)
    check(program, target.config, 2, TREE.num_nodes(GAMMA), max_decode_len=117)


@pytest.fixture(scope="module")
def v4():
    """Yields a mesh of one chip to compile for."""
    if jax.default_backend() != "cpu":
        pytest.skip("compiles what a machine without an accelerator traces")
    if reason := chips.no_compiler():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in chips.ENVIRONMENT.items():
            patch.setenv(name, value)
        _, devices = chips.topology("v4:2x2x1")
        yield make_mesh(1, 1, devices[:1])


@pytest.mark.parametrize("plain", [True, False])
def test_slots(v4, plain):
    """Inputs that are put into slots copy neither the text's caches nor the source's."""
    target, draft = tiny_t5(0, num_decoder_layers=2), TransformerDraft(tiny_t5(1))
    draft = None if plain else draft
    loop = Loop(gamma=0 if plain else GAMMA, max_decode_len=MAX_DECODE_LEN)
    models = shapes_of((target, draft), v4)

    def members(num, width, *, waits):
        def make(target, draft):
            sources, prompts, keys, _ = rows(num, 0.0)
            places = jnp.arange(num, dtype=jnp.int32)
            inputs = sources[:, :width], prompts, keys, jnp.full(num, 9, jnp.int32), places
            made = refill.prepare(target, draft, *inputs, loop=loop, waits=waits)
            return made if waits else refill.fill(made)

        return shapes_of(jax.eval_shape(make, *models), v4)

    arguments = members(3, 7, waits=False), members(2, 5, waits=True)
    settings, drain = shapes_of((rows(1, 0.0)[-1], jnp.asarray(False)), v4)
    with partitioned(v4):
        traced = refill.burst.trace(*models, *arguments, settings, drain, loop=loop)
        program = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    check(program, target.config, 3)
    assert not cache_copies(program, [(3, 2, 7, 8)])


def shapes_of(tree, mesh):
    """Returns shapes of arrays on a mesh, of models in bfloat16."""

    def shapes(node):
        if isinstance(node, T5Model):
            # Weights as on a TPU: as they were given, the output layer's too.
            config = dataclasses.replace(node.config, dtype="bfloat16")
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), node.params)
            node = node.replace(weights=params, module=Transformer(config), operations=XLA)
        if hasattr(node, "shared"):
            # The target's output layer, which heads share.
            shared = map_forms(lambda form: form.unpacked(), node.shared)
            node = node.replace(shared=shared, operations=XLA)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh)),
            node,
        )

    return jax.tree.map(
        shapes, tree, is_leaf=lambda node: isinstance(node, T5Model) or hasattr(node, "shared")
    )


def on_tpu(mesh, target, draft, **options):
    """Compiles the loop for models in bfloat16, at temperature 0: sampling has no cache."""
    args = shapes_of((target, draft, *rows(2, 0.0)), mesh)
    options = {"gamma": GAMMA, "max_decode_len": MAX_DECODE_LEN, **options}
    with partitioned(mesh):
        traced = speculative_decode.trace(*args, **options)
        program = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    # The instructions include the steps.
    assert any("dynamic-update-slice" in line for line in loop_instructions(program))
    return program
