"""The compiled loops copy no cache and do not talk with the host, read from their HLO."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from spec_t5x.autoregressive import autoregressive_decode
from spec_t5x.checkpoints.drafts import make_draft
from spec_t5x.checkpoints.loading import load
from spec_t5x.decoding import speculative_decode
from spec_t5x.distributions import sampling, standardize
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.experiments import tpu_chips
from spec_t5x.guard import guard
from spec_t5x.models.binding import bind
from spec_t5x.models.partitioning import make_mesh, partitioned, replicated
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.testing.compiled_loops import (
    cache_copies,
    host_transfers,
    loop_instructions,
    loop_lengths,
)
from spec_t5x.testing.toy_models import tiny_t5
from spec_t5x.verifiers import TreeVerifier
from tests.named_drafts import every_named_draft, named

# Lengths of caches that no other array has.
GAMMA, MAX_DECODE_LEN = 3, 37


@pytest.fixture(scope="module", autouse=True)
def no_check_of_types():
    """What is lowered is described by shapes, which stand where arrays belong."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def rows(batch, temperature):
    """Sources, prompts, keys and settings."""
    return (
        jnp.ones((batch, 7), jnp.int32),
        jnp.zeros((batch, 1), jnp.int32),
        jax.random.split(jax.random.key(0), batch),
        sampling(temperature),
    )


def on_cpu(target, draft, batch, temperature, **options):
    """The compiled loop; without a draft, that of plain decoding."""
    inputs, options = rows(batch, temperature), {"max_decode_len": MAX_DECODE_LEN, **options}
    if draft is None:
        lowered = autoregressive_decode.lower(target, *inputs, **options)
    else:
        lowered = speculative_decode.lower(target, draft, *inputs, gamma=GAMMA, **options)
    return lowered.compile().as_text()


def check(program, config, batch, room=GAMMA + 1):
    shapes = [
        (batch, config.num_heads, length, config.head_dim)
        for length in (MAX_DECODE_LEN + 1, MAX_DECODE_LEN + room)
    ]
    assert not cache_copies(program, shapes)
    assert not host_transfers(program)


@functools.cache
def toys():
    return tiny_t5(0, num_decoder_layers=2), TransformerDraft(tiny_t5(1))


TREE = TreeVerifier((2, 2))
# What is not decided by the draft: the loop.
LOOPS = {
    "plain": {"batch": 1, "temperature": 0.0},
    "speculative": {"batch": 1, "temperature": 0.0},
    "of several rows": {"batch": 3, "temperature": 1.0},
    "tree": {"batch": 3, "temperature": 1.0, "verifier": TREE},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_on_a_cpu(loop):
    target, draft = toys()
    assert target.kernels
    options = LOOPS[loop]
    draft = None if loop == "plain" else draft
    program = on_cpu(target, draft, **options)
    # What is looked through holds the steps.
    assert any("SpecT5XExtend" in line for line in loop_instructions(program))
    room = TREE.num_nodes(GAMMA) if loop == "tree" else GAMMA + 1
    check(program, target.config, options["batch"], room)


def test_at_temperature_0_no_distribution_of_the_draft_is_written():
    """Neither by the draft nor by the verifier; at any other, it is."""
    target, draft = toys()
    of_drafts = f"f32[3,{GAMMA},{target.vocab_size}]"
    assert of_drafts in on_cpu(target, draft, 3, 1.0)
    assert of_drafts not in on_cpu(target, draft, 3, 0.0)


def test_on_a_cpu_under_a_guard():
    """But the zeros that a draft's prefill starts from, once."""
    target, draft = toys()
    program = on_cpu(target, draft, 3, 0.0, guard=guard(c=0.1, verification=1.5))
    copies = cache_copies(program, [(3, 2, MAX_DECODE_LEN + GAMMA + 1, 8)])
    assert all("broadcast" in copy.partition("copy(")[2] for copy in copies)


@pytest.fixture(scope="module")
def pair(drafts_of_pair):
    """The target as it is loaded and bound, and what makes its drafts."""
    loaded = load(drafts_of_pair / "target")
    return loaded, bind(loaded.params, loaded.config), drafts_of_pair


@every_named_draft
def test_every_draft_on_a_cpu(draft, pair):
    loaded, target, directory = pair
    made = make_draft(named(draft, directory), loaded, target)
    check(on_cpu(target, made, 3, 1.0), target.config, 3)


@every_named_draft
def test_every_draft_on_a_tpu(draft, pair, v4):
    loaded, target, directory = pair
    made = make_draft(named(draft, directory), loaded, target)
    check(on_tpu(v4, target, made), target.config, 2)


def test_trees_on_a_tpu(v4):
    # Caches of a common size: XLA lays out toys as it does nothing else.
    sizes = {"emb_dim": 256, "num_heads": 8, "head_dim": 64, "num_decoder_layers": 2}
    target = tiny_t5(0, **sizes)
    program = on_tpu(v4, target, TransformerDraft(tiny_t5(1, **sizes)), verifier=TREE)
    check(program, target.config, 2, room=TREE.num_nodes(GAMMA))


@pytest.fixture(scope="module")
def v4():
    """One chip that programs are compiled for, without one."""
    pytest.importorskip("libtpu", reason="needs libtpu, which PyPI has for Linux only")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tpu_chips.ENVIRONMENT.items():
            patch.setenv(name, value)
        _, devices = tpu_chips.topology("v4:2x2x1")
        yield make_mesh(1, 1, devices[:1])


def on_tpu(mesh, target, draft, **options):
    """The compiled loop, of models in bfloat16."""

    def shapes(node):
        if isinstance(node, T5Model):
            config = dataclasses.replace(node.config, dtype="bfloat16")
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), node.params)
            node = node.replace(params=params, module=Transformer(config), kernels=False)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh)),
            node,
        )

    args = (target, draft, *rows(2, 1.0))
    args = jax.tree.map(shapes, args, is_leaf=lambda node: isinstance(node, T5Model))
    options |= {"gamma": GAMMA, "max_decode_len": MAX_DECODE_LEN}
    with partitioned(mesh):
        traced = speculative_decode.trace(*args, **options)
        program = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    # What is looked through holds the steps.
    assert any("dynamic-update-slice" in line for line in loop_instructions(program))
    return program


@pytest.mark.parametrize("kept", [{"top_k": 40}, {"top_p": 0.9}], ids=["top_k", "top_p"])
def test_a_filter_passes_over_the_vocabulary_8_times_on_a_tpu(kept, v4):
    rows, vocab = 16, 4096
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32, sharding=replicated(v4))
    filtered = jax.jit(functools.partial(standardize, settings=sampling(1.0, **kept)))
    compiled = filtered.trace(logits).lower(lowering_platforms=("tpu",)).compile()
    program = compiled.as_text()
    assert loop_lengths(program) == [8]
    # In each of them one reduction, of 15 thresholds, and none of them is kept.
    over_the_vocabulary = [
        line
        for line in loop_instructions(program)
        if re.search(rf"\[{rows},15\]\S* reduce\(", line)
    ]
    assert len(over_the_vocabulary) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * rows * vocab * 4


def test_a_copy_is_seen():
    @jax.jit
    def swaps(caches):
        return jax.lax.fori_loop(0, 5, lambda _, pair: (pair[1] + 1, pair[0]), caches)

    cache = jnp.zeros((3, 4, 5))
    assert cache_copies(swaps.lower((cache, cache)).compile().as_text(), [(3, 4, 5)])
    assert not cache_copies(swaps.lower((cache, cache)).compile().as_text(), [(3, 4, 6)])
    plain = jax.jit(lambda cache: jax.lax.fori_loop(0, 5, lambda _, cache: cache + 1, cache))
    assert not cache_copies(plain.lower(cache).compile().as_text(), [(3, 4, 5)])


def test_talk_with_the_host_is_seen():
    @jax.jit
    def loop(number):
        def body(_, number):
            jax.debug.callback(lambda _: None, number)
            return number + 1

        return jax.lax.fori_loop(0, 5, body, number)

    assert host_transfers(loop.lower(1.0).compile().as_text())
