"""The compiled loops copy no cache and do not talk with the host, read from their HLO."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from spec_t5x.autoregressive import autoregressive_decode
from spec_t5x.decoding import speculative_decode
from spec_t5x.distributions import sampling, standardize
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.experiments import tpu_chips, tpu_programs
from spec_t5x.experiments.tpu_programs import Workload
from spec_t5x.models.partitioning import make_mesh
from spec_t5x.models.t5 import T5Config
from spec_t5x.testing.compiled_loops import (
    cache_copies,
    host_transfers,
    loop_instructions,
    loop_lengths,
)
from spec_t5x.testing.toy_models import tiny_t5

GAMMA, MAX_DECODE_LEN = 3, 37
# Lengths that no other array has.
LENGTHS = (MAX_DECODE_LEN + 1, MAX_DECODE_LEN + GAMMA + 1)


@pytest.fixture(scope="module", autouse=True)
def no_check_of_types():
    """What is lowered is described by shapes, which stand where arrays belong."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def cpu_program(loop, batch, temperature):
    target, draft = tiny_t5(0, num_decoder_layers=2), TransformerDraft(tiny_t5(1))
    assert target.kernels
    common = (
        jnp.ones((batch, 7), jnp.int32),
        jnp.zeros((batch, 1), jnp.int32),
        jax.random.key(0),
        sampling(temperature),
    )
    if loop == "plain":
        lowered = autoregressive_decode.lower(target, *common, max_decode_len=MAX_DECODE_LEN)
    else:
        lowered = speculative_decode.lower(
            target, draft, *common, gamma=GAMMA, max_decode_len=MAX_DECODE_LEN
        )
    config = target.config
    shapes = [(batch, config.num_heads, length, config.head_dim) for length in LENGTHS]
    return lowered.compile().as_text(), shapes


@pytest.mark.parametrize(
    ("loop", "batch", "temperature"),
    [("plain", 1, 0.0), ("speculative", 1, 0.0), ("speculative", 3, 1.0)],
)
def test_on_a_cpu(loop, batch, temperature):
    program, shapes = cpu_program(loop, batch, temperature)
    # What is looked through holds the steps.
    assert any("SpecT5XExtend" in line for line in loop_instructions(program))
    assert not cache_copies(program, shapes)
    assert not host_transfers(program)


def test_at_temperature_0_no_distribution_of_the_draft_is_written():
    """Neither by the draft nor by the verifier; at any other, it is."""
    of_drafts = f"f32[3,{GAMMA},{tiny_t5(0).vocab_size}]"
    assert of_drafts in cpu_program("speculative", 3, 1.0)[0]
    assert of_drafts not in cpu_program("speculative", 3, 0.0)[0]


def test_on_a_tpu():
    pytest.importorskip("libtpu", reason="needs libtpu, which PyPI has for Linux only")
    config = T5Config(
        vocab_size=256,
        emb_dim=128,
        num_heads=2,
        head_dim=64,
        mlp_dim=128,
        num_encoder_layers=1,
        num_decoder_layers=2,
    )
    work = Workload(batch=2, source_len=16, max_decode_len=MAX_DECODE_LEN)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tpu_chips.ENVIRONMENT.items():
            patch.setenv(name, value)
        _, devices = tpu_chips.topology("v4:2x2x1")
        mesh = make_mesh(1, 1, devices[:1])
        program = tpu_programs.speculative_loop(config, config, work, GAMMA, mesh).as_text()
    shapes = [(work.batch, config.num_heads, LENGTHS[1], config.head_dim)]
    assert any("dynamic-update-slice" in line for line in loop_instructions(program))
    assert not cache_copies(program, shapes)
    assert not host_transfers(program)


@pytest.fixture(scope="module")
def tpu():
    """The sharding of what lies on one TPU v4 that is not there."""
    pytest.importorskip("libtpu", reason="needs libtpu, which PyPI has for Linux only")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tpu_chips.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield jax.sharding.SingleDeviceSharding(tpu_chips.topology("v4:2x2x1")[1][0])


def tpu_program(function, sharding, *args):
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.parametrize("kept", [{"top_k": 40}, {"top_p": 0.9}], ids=["top_k", "top_p"])
def test_a_filter_passes_over_the_vocabulary_8_times_on_a_tpu(kept, tpu):
    rows, vocab = 16, 4096
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    compiled = tpu_program(
        functools.partial(standardize, settings=sampling(1.0, **kept)), tpu, logits
    )
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
