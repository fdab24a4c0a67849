"""Refill (continuous batching): the rows of an input that has ended go to the next input.

A batch without refill runs until its slowest row has ended. This loop pauses whenever an input
has ended, stores its outputs and gives its *slot*, its ``num_decodes`` rows, to the next input.
Inputs that wait for a slot form a *group*, whose encoder has run. A *burst* is one call of the
program: it decodes until all of the group have had slots and a slot is free again. The device
never idles, because the host meanwhile submits the next group and fetches earlier outputs.

Rows do not affect one another, so an input gets the output that it gets in any other batch. The
order of decoding depends on the inputs alone: with a pace, whose limit is for all rows, the same
inputs give the same bytes.
"""

import flax.linen.partitioning as flax_partitioning
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops import arguments, compiled, decode_state, speculative
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.decode_state import DecodeState, Loop, NoDraft
from spec_t5x.loops.outputs import Decoded, Outputs
from spec_t5x.loops.pace import Pace
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import Array, Bool, Int, Key, PyTree

# The place (index among all inputs) of a slot that has no input, and of padding.
EMPTY_SLOT = -1


@flax.struct.dataclass(kw_only=True)
class Members:
    """Inputs whose prefill has run: in slots, or in a group that waits for slots."""

    # The loop's state. In a group it has no pace, and caches with room for the prompts alone.
    state: DecodeState
    # The arguments of the draft's prefill, which a pace may postpone.
    sources: PyTree
    prompts: Int[Array, "inputs width"]
    # The index of each input among all inputs; ``EMPTY_SLOT`` for a free slot, and for padding,
    # which is last.
    places: Int[Array, "inputs"]
    # In slots, whether the draft's state exists in all of them; False while the pace takes plain
    # steps. None in a group.
    drafting: Bool[Array, ""] | None = None

    @property
    def is_used(self) -> Bool[Array, "slots"]:
        """Mask of the slots that have an input, or of a group's inputs that are no padding."""
        return self.places != EMPTY_SLOT

    @property
    def has_ended(self) -> Bool[Array, "slots"]:
        """Mask of the slots that have an input all of whose rows have ended."""
        ended = self.state.outputs.ended.reshape(self.places.shape[0], -1).all(axis=1)
        return self.is_used & ended


@flax.struct.dataclass(kw_only=True)
class Ended:
    """Outputs of the inputs that ended in a burst, in the order of ending."""

    # The index of each output's input among all; ``EMPTY_SLOT`` after the last output.
    places: Int[Array, "inputs"]
    decoded: Decoded
    # Number of target calls in the burst, each over all rows.
    calls: Int[Array, ""]


@flax.struct.dataclass(kw_only=True)
class _Burst:
    """Carry of a burst's loop."""

    slots: Members
    group: Members
    # Number of the group's members that have had a slot.
    taken: Int[Array, ""]
    # Outputs, statistics and places of the inputs that ended, and the number of these inputs.
    ended: tuple[Outputs, PyTree, Int[Array, "inputs"]]
    num_ended: Int[Array, ""]
    calls: Int[Array, ""]

    @property
    def is_waiting(self) -> Bool[Array, ""]:
        return jnp.sum(self.group.is_used) > self.taken

    @property
    def wants_refill(self) -> Bool[Array, "slots"]:
        return self.slots.has_ended | (~self.slots.is_used & self.is_waiting)


@compiled.jit(static_argnames=("loop", "paced", "waits"))
def prepare(
    target: Target,
    draft: Draft | None,
    sources: PyTree,
    prompts: Int[Array, "inputs width"],
    keys: Key[Array, "inputs"],
    max_decode_steps: Int[Array, "inputs"],
    places: Int[Array, "inputs"],
    *,
    loop: Loop,
    paced: bool = False,
    waits: bool = True,
) -> Members:
    """Returns inputs with their sources encoded and their prompts fed; padding must be last.

    If ``draft`` is None, decoding is plain and ``loop.gamma`` must be 0. ``places`` are indices
    among all inputs, ``EMPTY_SLOT`` for padding, whose ``max_decode_steps`` must be 0. If
    ``paced``, a pace decides when the draft's prefill runs. If the inputs wait for slots
    (``waits``), caches have room for prompts alone, and widths may be less than the slots'.
    Errors are those of ``arguments.check``.
    """
    draft = draft or NoDraft(target.vocab_size)
    arguments.check(target, draft, prompts, loop)
    stream = arguments.row_stream(keys, prompts.shape[0], loop)
    state = decode_state.init(
        *(target, draft, sources, prompts, stream, loop),
        max_decode_steps=max_decode_steps,
        paced=paced,
        room=prompts.shape[1] if waits else None,
    )
    return _spread_rows(Members(state=state, sources=sources, prompts=prompts, places=places))


def fill(members: Members, pace: Pace | None = None) -> Members:
    """Returns slots of a run's first inputs (``waits=False``); no later source may be wider."""
    # A copy of the pace: slots are donated, and this pace is the caller's.
    state = members.state.replace(pace=pace and jax.tree.map(jnp.copy, pace))
    return members.replace(state=state, drafting=jnp.asarray(pace is None))


@compiled.jit(static_argnames="loop", donate_argnames="slots")
def burst(
    target: Target,
    draft: Draft | None,
    slots: Members,
    group: Members,
    settings: Sampling,
    drain: Bool[Array, ""],
    *,
    loop: Loop,
) -> tuple[Members, Ended]:
    """Decodes until all of ``group`` have had slots and one is free; with ``drain``, until all are.

    Donates ``slots``, and returns the new ones and the outputs of inputs that ended. The group may
    be all padding. ``settings`` are those of all inputs.
    """
    is_plain, draft = draft is None, draft or NoDraft(target.vocab_size)
    if loop.verifier.coupled:
        settings = settings.keep_ties()

    def iterate(carry: _Burst, loop: Loop) -> _Burst:
        state, _ = speculative.step(target, draft, carry.slots.state, settings, loop)
        return carry.replace(slots=carry.slots.replace(state=state), calls=carry.calls + 1)

    def make_ready(carry: _Burst) -> _Burst:
        return _made_ready(carry, draft, settings, loop)

    def until_one_ends(carry: _Burst) -> _Burst:
        return speculative.drive(
            carry,
            lambda carry: ~jnp.any(carry.slots.has_ended),
            lambda carry: carry.slots.state.pace,
            iterate,
            make_ready,
            loop,
        )

    def unfinished(carry: _Burst) -> Bool[Array, ""]:
        is_used = carry.slots.is_used
        return jnp.all(is_used) | (drain & jnp.any(is_used))

    carry = _begun(slots, group)
    if slots.state.pace is not None:
        # If the slots have draft states, the group must have them before its inputs get slots.
        wanted = carry.slots.state.pace.limit > 0
        carry = carry.replace(slots=carry.slots.replace(drafting=slots.drafting & wanted))
        carry = decode_state.if_wanted(wanted, make_ready, carry)
    carry = lax.while_loop(
        unfinished, lambda carry: _refilled(until_one_ends(carry)), _refilled(carry)
    )
    return _finished(carry, loop, is_plain)


def _begun(slots: Members, group: Members) -> _Burst:
    """Returns a burst's carry before its first iteration."""
    state, num = slots.state, slots.places.shape[0]
    if state.pace is not None:
        slots = slots.replace(state=state.replace(pace=state.pace.new_batch()))
    capacity = num + group.places.shape[0]

    def room(leaf):
        return jnp.zeros((capacity * (leaf.shape[0] // num), *leaf.shape[1:]), leaf.dtype)

    outputs, stats = jax.tree.map(room, (state.outputs, state.stats))
    return _Burst(
        slots=slots,
        # A slot on any device may get any input: the group is gathered once, not for each slot.
        group=_gather_rows(group),
        taken=jnp.int32(0),
        ended=(outputs, stats, jnp.full(capacity, EMPTY_SLOT, jnp.int32)),
        num_ended=jnp.int32(0),
        calls=jnp.int32(0),
    )


def _finished(carry: _Burst, loop: Loop, is_plain: bool) -> tuple[Members, Ended]:
    """Returns the slots for the next burst, and the results of this one."""
    state, (outputs, stats, places) = carry.slots.state, carry.ended
    pace = state.pace and state.pace.end_batch()
    stats = None if is_plain else stats
    decoded = outputs_lib.finish(outputs, loop.num_decodes, loop.max_decode_len, stats, pace)
    # Spread as by ``prepare``, so that the next burst is the same program.
    slots = _spread_rows(carry.slots.replace(state=state.replace(pace=None), drafting=None))
    slots = slots.replace(state=slots.state.replace(pace=pace), drafting=carry.slots.drafting)
    return slots, Ended(places=places, decoded=decoded, calls=carry.calls)


def _made_ready(carry: _Burst, draft: Draft, settings: Sampling, loop: Loop) -> _Burst:
    """Feeds the draft the slots' texts; runs its prefill for the group if it has not run."""
    group, slots = carry.group, carry.slots
    waiting = decode_state.if_wanted(
        ~slots.state.pace.prefilled,
        lambda _: decode_state.prefill_draft(
            draft, group.sources, group.prompts, loop, group.prompts.shape[1]
        ),
        group.state.draft_state,
    )
    group = group.replace(state=group.state.replace(draft_state=_gather_rows(waiting)))
    state = speculative.prepare(
        draft, slots.sources, slots.prompts, slots.state, settings, loop, has_state=slots.drafting
    )
    slots = slots.replace(state=state, drafting=jnp.asarray(True))
    return carry.replace(slots=slots, group=group)


def _refilled(carry: _Burst) -> _Burst:
    """Stores the outputs of ended inputs and gives free slots to waiting ones, one by one."""

    def refill(carry: _Burst) -> _Burst:
        slot = jnp.argmax(carry.wants_refill).astype(jnp.int32)
        return _filled(_taken_out(carry, slot), slot)

    return lax.while_loop(lambda carry: jnp.any(carry.wants_refill), refill, carry)


def _taken_out(carry: _Burst, slot: Int[Array, ""]) -> _Burst:
    """Stores the outputs of a slot; the next input's overwrite those of a free slot."""
    slots = carry.slots
    found = slots.state.outputs, slots.state.stats, slots.places
    return carry.replace(
        ended=with_input(
            carry.ended, found, source=slot, to=carry.num_ended, num_sources=slots.places.shape[0]
        ),
        num_ended=carry.num_ended + slots.is_used[slot],
    )


def _filled(carry: _Burst, slot: Int[Array, ""]) -> _Burst:
    """Gives a slot to the next waiting input; marks the slot as free if none waits."""
    group, slots, is_there = carry.group, carry.slots, carry.is_waiting
    num_sources, num_slots = group.places.shape[0], slots.places.shape[0]
    source = jnp.minimum(carry.taken, num_sources - 1)
    kept = slots.state.replace(pace=None), slots.sources, slots.prompts, slots.places
    new = group.state, group.sources, group.prompts, group.places
    state, sources, prompts, places = with_input(
        kept, new, source=source, to=slot, num_sources=num_sources
    )
    ended, is_freed = state.outputs.ended, (jnp.arange(num_slots) == slot) & ~is_there
    ended |= jnp.repeat(is_freed, ended.shape[0] // num_slots)
    slots = slots.replace(
        state=state.replace(outputs=state.outputs.replace(ended=ended), pace=slots.state.pace),
        sources=sources,
        prompts=prompts,
        places=jnp.where(is_freed, EMPTY_SLOT, places),
    )
    return carry.replace(slots=slots, taken=carry.taken + is_there)


def with_input(
    kept: PyTree, new: PyTree, *, source: Int[Array, ""], to: Int[Array, ""], num_sources: int
) -> PyTree:
    """Returns a batch ``kept`` with input ``to`` replaced by input ``source`` of a batch ``new``.

    ``new`` has ``num_sources`` inputs. In both batches, an array has one row, or ``num_decodes``
    consecutive ones, for each input. Shorter rows of ``new`` are padded with zeros, since what
    ``kept`` holds there may not be finite, and weight 0 times infinity is not 0.
    """

    def copy(kept: Array, new: Array) -> Array:
        each = new.shape[0] // num_sources
        rows = lax.dynamic_slice_in_dim(new, source * each, each)
        missing = np.subtract(kept.shape[1:], rows.shape[1:])
        if np.any(missing):
            rows = jnp.pad(rows, ((0, 0), *((0, after) for after in missing)))
        return lax.dynamic_update_slice_in_dim(kept, rows, to * each, axis=0)

    return jax.tree.map(copy, kept, new)


def _spread_rows(tree: PyTree) -> PyTree:
    """Shards the first axis (batch) of each array; replicates it if the mesh axis does not fit."""
    return _with_rows(tree, dict(flax_partitioning.get_axis_rules()).get("batch"))


def _gather_rows(tree: PyTree) -> PyTree:
    """Replicates the first axis of each array, the batch, on all devices of the mesh."""
    return _with_rows(tree, None)


def _with_rows(tree: PyTree, axis: str | None) -> PyTree:
    """Constrains the rows' axis, which XLA shards differently in each program, on a mesh only."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not flax_partitioning.get_axis_rules():
        return tree

    def constrain(leaf: Array) -> Array:
        first = axis if axis and leaf.shape[0] % mesh.shape[axis] == 0 else None
        others = [PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 1)
        return lax.with_sharding_constraint(leaf, PartitionSpec(first, *others))

    return jax.tree.map(constrain, tree)
