"""The compiled loops copy no cache and do not talk with the host, read from their HLO."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.loops import refill
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA
from spec_t5x.sampling.distributions import sampling
from spec_t5x.verifiers import TreeVerifier
from tests.loops.compiled_loops import cache_copies, host_transfers, loop_instructions
from tests.named_drafts import EVERY, named
from tests.toy_t5 import tiny_t5

# XLA decides on copies before it makes machine code, which need not be fast.
pytestmark = [
    pytest.mark.usefixtures("quick_compilation", "unchecked_module"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads programs for a CPU"),
]

# Lengths of caches that no other array has.
GAMMA, MAX_DECODE_LEN = 3, 37


def rows(batch, temperature):
    """Makes sources, prompts, keys and settings."""
    return (
        jnp.ones((batch, 7), jnp.int32),
        jnp.zeros((batch, 1), jnp.int32),
        jax.random.split(jax.random.key(0), batch),
        sampling(temperature),
    )


def on_cpu(target, draft, batch, temperature, **options):
    """Compiles the loop; without a draft, that of plain decoding."""
    inputs, options = rows(batch, temperature), {"max_decode_len": MAX_DECODE_LEN, **options}
    if draft is None:
        lowered = autoregressive_decode.lower(target, *inputs, **options)
    else:
        lowered = speculative_decode.lower(target, draft, *inputs, gamma=GAMMA, **options)
    return lowered.compile().as_text()


def check(program, config, batch, room=GAMMA + 1, max_decode_len=MAX_DECODE_LEN):
    shapes = [
        (batch, config.num_kv_heads, length, config.head_dim)
        for length in (max_decode_len + 1, max_decode_len + room)
    ]
    assert not cache_copies(program, shapes)
    assert not host_transfers(program)


def by_kernels(target):
    """Returns the target, or skips the test if XLA computes it."""
    if not target.operations.skips:
        pytest.skip("XLA for CPUs, without kernels, copies caches")
    return target


@functools.cache
def toys():
    return by_kernels(tiny_t5(0, num_decoder_layers=2)), TransformerDraft(tiny_t5(1))


TREE = TreeVerifier((2, 2))


def test_on_a_cpu():
    """At temperature 0 neither draft nor verifier writes a distribution of the draft."""
    target, draft = toys()
    of_drafts = f"f32[{{}},{GAMMA},{target.vocab_size}]"
    for batch, temperature in ((1, 0.0), (3, 1.0)):
        program = on_cpu(target, draft, batch, temperature)
        # The instructions include the steps, as kernels or products.
        steps = [line for line in loop_instructions(program) if "Extend" in line or " dot(" in line]
        assert steps
        check(program, target.config, batch)
        assert (of_drafts.format(batch) in program) == (temperature > 0)


def test_plain_decoding_and_trees_on_a_cpu():
    target, draft = toys()
    check(on_cpu(target, None, 1, 0.0), target.config, 1)
    tree = on_cpu(target, draft, 3, 1.0, verifier=TREE)
    check(tree, target.config, 3, TREE.num_nodes(GAMMA))


def test_states_that_no_draft_uses_leave_no_trace_in_a_call_over_several_widths():
    target = tiny_t5(0, emb_dim=40)
    target = target.replace(weights=target.params, operations=XLA)
    program = on_cpu(target, CopyDraft(target.vocab_size), 3, 1.0)
    (call,) = [line for line in loop_instructions(program) if " conditional(" in line]
    assert f"{target.vocab_size}]" in call and "40]" not in call.partition("conditional(")[0]


def test_on_a_cpu_at_a_pace():
    """Only the zeros that a draft's prefill starts from are copied, once."""
    target, draft = toys()
    program = on_cpu(target, draft, 3, 0.0, pace=Pace.start(Costs.by_formula(c=0.1, largest=3)))
    copies = cache_copies(program, [(3, 2, MAX_DECODE_LEN + GAMMA + 1, 8)])
    assert all("broadcast" in copy.partition("copy(")[2] for copy in copies)


def burst(target, draft, temperature, pace=None):
    """Lowers ``refill.burst`` of three slots and a group of five."""
    loop = Loop(gamma=GAMMA if draft else 0, max_decode_len=MAX_DECODE_LEN)
    common = {"loop": loop, "paced": pace is not None}

    def members(num, width, *, waits):
        sources, prompts, keys, _ = rows(num, temperature)
        places = jnp.arange(num, dtype=jnp.int32)
        inputs = sources[:, :width], prompts, keys, jnp.full(num, 9, jnp.int32), places
        return refill.prepare(target, draft, *inputs, waits=waits, **common)

    held = refill.fill(members(3, 7, waits=False), pace)
    arguments = held, members(5, 5, waits=True), sampling(temperature), np.bool_(False)
    return refill.burst.lower(target, draft, *arguments, loop=loop), held


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slots_on_a_cpu(temperature):
    """Inputs are put into slots in place, and each burst writes to the slots it is given."""
    target, draft = toys()
    for proposer in (None, draft):
        lowered, held = burst(target, proposer, temperature)
        program = lowered.compile().as_text()
        check(program, target.config, 3)
        assert not cache_copies(program, [(3, 2, 7, 8)])
        donated = len(jax.tree.leaves(held))
        assert len(re.findall(r"\((\d+), {}, (?:may|must)-alias\)", program)) == donated


def test_slots_on_a_cpu_at_a_pace():
    """The draft's state of the sources is laid out once, where it is made."""
    target, draft = toys()[0], TransformerDraft(tiny_t5(1, num_heads=3))
    lowered, _ = burst(target, draft, 0.0, Pace.start(Costs.by_formula(c=0.1, largest=3)))
    program = lowered.compile().as_text()
    check(program, target.config, 3)
    assert not cache_copies(program, [(3, 2, 7, 8)])
    copies = cache_copies(program, [(3, 3, 7, 8), (5, 3, 5, 8)])
    assert all("empty_cache" in copy for copy in copies)


# Drafts without a cache are left out, and a second one of the same kind.
@pytest.mark.parametrize("draft", [d for d in EVERY if d not in ("uniform", "int8", "{}/narrow")])
def test_drafts_on_a_cpu(draft, target_of_drafts):
    loaded, target, directory = target_of_drafts
    made = make_draft(named(draft, directory), loaded, by_kernels(target))
    check(on_cpu(target, made, 3, 1.0), target.config, 3)


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
