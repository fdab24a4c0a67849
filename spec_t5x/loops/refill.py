"""Refill: rows of a batch take the next input as soon as they have ended.

A batch runs until its slowest row has ended. This loop stops whenever an input has ended, keeps
its outputs and gives its *slot*, the ``num_decodes`` rows it had, to the next one. The next
inputs wait in a *group*, whose encoder has run. A *burst* is one program: it decodes until the
group is used up and a slot is free, when the host hands over the next group. The device never
idles: the host encodes the next group and fetches outputs meanwhile.

Rows do not see one another, so that an input gets the output that it gets in any other batch. The
order of decoding follows from the inputs alone: with a pace, whose decisions are for all rows,
the same inputs give the same bytes.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops import decode_state, speculative
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.decode_state import DecodeState, Loop, NoDraft
from spec_t5x.loops.outputs import Decoded, Outputs
from spec_t5x.loops.pace import Pace
from spec_t5x.machine.meshes import gather_rows, spread_rows
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import Array, Bool, Int, Key, PyTree

# The index, among all inputs, of a slot without an input.
EMPTY_SLOT = -1


@flax.struct.dataclass(kw_only=True)
class Move:
    """An input of one batch that replaces an input of another.

    Arrays of either batch have one row for each input, or ``num_decodes``, which follow one
    another.
    """

    # Indices of the two inputs, and the number of inputs in the first batch.
    source: Int[Array, ""]
    to: Int[Array, ""]
    num_sources: int = flax.struct.field(pytree_node=False)

    def beginning(self, kept: Array, new: Array) -> Array:
        """Returns ``kept`` with the input's rows of ``new``, which may be shorter."""
        return self._put(kept, self._rows(new))

    def whole(self, kept: Array, new: Array) -> Array:
        """Returns ``kept`` with the input's rows of ``new``, padded with zeros to its length."""
        rows = self._rows(new)
        missing = np.subtract(kept.shape[1:], rows.shape[1:])
        if np.any(missing):
            rows = jnp.pad(rows, ((0, 0), *((0, after) for after in missing)))
        return self._put(kept, rows)

    def of_all(self, kept: PyTree, new: PyTree) -> PyTree:
        """Moves ``whole`` rows in all leaves, or calls a node's own ``insert_rows(new, move)``."""

        def move(kept, new):
            own = getattr(kept, "insert_rows", None)
            return self.whole(kept, new) if own is None else own(new, self)

        return jax.tree.map(move, kept, new, is_leaf=lambda node: hasattr(node, "insert_rows"))

    def _rows(self, new: Array) -> Array:
        each = new.shape[0] // self.num_sources
        return lax.dynamic_slice_in_dim(new, self.source * each, each)

    def _put(self, kept: Array, rows: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(kept, rows, self.to * rows.shape[0], axis=0)


@flax.struct.dataclass(kw_only=True)
class Members:
    """Inputs that were encoded together, ready to be decoded: in slots, or waiting for one."""

    # The loop's state; of waiting inputs, without a pace, and with room for their prompts alone.
    state: DecodeState
    # The arguments of the draft's prefill, where the pace postpones it.
    sources: PyTree
    prompts: Int[Array, "inputs width"]
    # The index of each input among all; ``EMPTY_SLOT`` in a free slot, and for padding, which is
    # last.
    places: Int[Array, "inputs"]


@flax.struct.dataclass(kw_only=True)
class Slots(Members):
    """The inputs being decoded, from burst to burst."""

    # Whether all of them have the draft's state; not where the pace takes plain steps.
    drafting: Bool[Array, ""]

    @property
    def is_used(self) -> Bool[Array, "slots"]:
        """Slots that hold an input."""
        return self.places != EMPTY_SLOT

    @property
    def has_ended(self) -> Bool[Array, "slots"]:
        """Slots whose input has ended."""
        ended = self.state.outputs.ended.reshape(self.places.shape[0], -1).all(axis=1)
        return self.is_used & ended


@flax.struct.dataclass(kw_only=True)
class Ended:
    """The results of a burst."""

    # The index of each output's input among all; ``EMPTY_SLOT`` beyond those that ended.
    places: Int[Array, "inputs"]
    decoded: Decoded
    # Target calls of the burst; each is for all rows.
    calls: Int[Array, ""]


@flax.struct.dataclass(kw_only=True)
class _Burst:
    """The state of a burst's loop."""

    slots: Slots
    group: Members
    # Members of the group that have had a slot.
    taken: Int[Array, ""]
    # Outputs and statistics of the rows that ended, their inputs' indices, and their number.
    ended: tuple[Outputs, PyTree, Int[Array, "inputs"]]
    num_ended: Int[Array, ""]
    calls: Int[Array, ""]

    @property
    def is_waiting(self) -> Bool[Array, ""]:
        return jnp.sum(self.group.places != EMPTY_SLOT) > self.taken

    @property
    def wants_refill(self) -> Bool[Array, "slots"]:
        return self.slots.has_ended | (~self.slots.is_used & self.is_waiting)


@functools.partial(jax.jit, static_argnames=("loop", "paced", "waits"))
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
    """Encodes inputs and feeds their prompts; padding comes last.

    Without a draft decoding is plain, and ``loop.gamma`` 0. ``places`` are the inputs' indices
    among all, ``EMPTY_SLOT`` of padding, whose ``max_decode_steps`` is 0. If ``paced``, a pace
    decides when the draft's state is made. If the inputs wait for slots (``waits``), their caches
    have room for the prompts alone, and sources and prompts may be shorter than the slots'.
    """
    stream = outputs_lib.row_stream(
        keys, prompts.shape[0], loop.num_decodes, loop.verifier.coupled, loop.max_decode_len
    )
    state = decode_state.init(
        target,
        draft or NoDraft(target.vocab_size),
        sources,
        prompts,
        stream,
        loop,
        max_decode_steps=max_decode_steps,
        paced=paced,
        room=prompts.shape[1] if waits else None,
    )
    return spread_rows(Members(state=state, sources=sources, prompts=prompts, places=places))


def fill(members: Members, pace: Pace | None = None) -> Slots:
    """Returns slots of the first inputs, which do not wait; no later ones have longer sources."""
    # A copy of the pace: slots are donated, and this pace is the caller's.
    state = members.state.replace(pace=pace and jax.tree.map(jnp.copy, pace))
    return Slots(**{**vars(members), "state": state}, drafting=jnp.asarray(pace is None))


@functools.partial(jax.jit, static_argnames="loop", donate_argnames="slots")
def burst(
    target: Target,
    draft: Draft | None,
    slots: Slots,
    group: Members,
    settings: Sampling,
    drain: Bool[Array, ""],
    *,
    loop: Loop,
) -> tuple[Slots, Ended]:
    """Decodes until all of a group have had slots and one is free; to the end with ``drain``.

    The slots are donated. The group may be all padding; all inputs have the same ``settings``.
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
        # A group's draft state must exist before its inputs get slots that have theirs.
        wanted = carry.slots.state.pace.limit() > 0
        drafting = slots.drafting & wanted
        carry = carry.replace(slots=carry.slots.replace(drafting=drafting))
        carry = decode_state.if_wanted(wanted, make_ready, carry)
    carry = lax.while_loop(
        unfinished, lambda carry: _refilled(until_one_ends(carry)), _refilled(carry)
    )
    return _finished(carry, loop, is_plain)


def _begun(slots: Slots, group: Members) -> _Burst:
    """Returns the state at the start of a burst."""
    state, num = slots.state, slots.places.shape[0]
    if state.pace is not None:
        slots = slots.replace(state=state.replace(pace=state.pace.new_batch()))
    # One more, to which slots that were free are written.
    capacity = num + group.places.shape[0] + 1

    def room(leaf):
        return jnp.zeros((capacity * (leaf.shape[0] // num), *leaf.shape[1:]), leaf.dtype)

    outputs, stats = jax.tree.map(room, (state.outputs, state.stats))
    return _Burst(
        slots=slots,
        # Any device may fill a slot with any input: gathered once, not for each slot.
        group=gather_rows(group),
        taken=jnp.int32(0),
        ended=(outputs, stats, jnp.full(capacity, EMPTY_SLOT, jnp.int32)),
        num_ended=jnp.int32(0),
        calls=jnp.int32(0),
    )


def _finished(carry: _Burst, loop: Loop, is_plain: bool) -> tuple[Slots, Ended]:
    """Returns the slots for the next burst, and the results of this one."""
    state, (outputs, stats, places) = carry.slots.state, carry.ended
    pace, stats = state.pace and state.pace.end_batch(), None if is_plain else stats
    decoded = outputs_lib.finish(outputs, loop.num_decodes, loop.max_decode_len, stats, pace)
    rows = {**vars(carry.slots), "state": state.replace(pace=None)}
    drafting = rows.pop("drafting")
    # Spread as by ``prepare``, so that the next burst is the same program.
    rows = spread_rows(rows)
    slots = Slots(**{**rows, "state": rows["state"].replace(pace=pace)}, drafting=drafting)
    return slots, Ended(places=places, decoded=decoded, calls=carry.calls)


def _made_ready(carry: _Burst, draft: Draft, settings: Sampling, loop: Loop) -> _Burst:
    """Brings the draft up to the slots' texts, and makes its state for waiting inputs."""
    group, slots = carry.group, carry.slots
    waiting = decode_state.if_wanted(
        ~slots.state.pace.prefilled,
        lambda _: decode_state.prefill_draft(
            draft, group.sources, group.prompts, loop, group.prompts.shape[1]
        ),
        group.state.draft_state,
    )
    group = group.replace(state=group.state.replace(draft_state=gather_rows(waiting)))
    state = speculative.prepare(
        draft,
        slots.sources,
        slots.prompts,
        slots.state,
        settings,
        loop,
        has_state=slots.drafting,
    )
    slots = slots.replace(state=state, drafting=jnp.asarray(True))
    return carry.replace(slots=slots, group=group)


def _refilled(carry: _Burst) -> _Burst:
    """Takes out what has ended and fills free slots, one after the other."""

    def refill(carry: _Burst) -> _Burst:
        slot = jnp.argmax(carry.wants_refill).astype(jnp.int32)
        return _filled(_taken_out(carry, slot), slot)

    return lax.while_loop(lambda carry: jnp.any(carry.wants_refill), refill, carry)


def _taken_out(carry: _Burst, slot: Int[Array, ""]) -> _Burst:
    """Keeps the outputs of a slot; those of a free one are overwritten by the next."""
    slots = carry.slots
    move = Move(source=slot, to=carry.num_ended, num_sources=slots.places.shape[0])
    return carry.replace(
        ended=move.of_all(carry.ended, (slots.state.outputs, slots.state.stats, slots.places)),
        num_ended=carry.num_ended + slots.is_used[slot],
    )


def _filled(carry: _Burst, slot: Int[Array, ""]) -> _Burst:
    """Gives a slot to the next input that waits, and frees it if there is none."""
    group, slots, is_there = carry.group, carry.slots, carry.is_waiting
    num_sources, num_slots = group.places.shape[0], slots.places.shape[0]
    source = jnp.minimum(carry.taken, num_sources - 1)
    state = _cleared(slots.state.replace(pace=None), slot, num_slots)
    state, sources, prompts, places = Move(source=source, to=slot, num_sources=num_sources).of_all(
        (state, slots.sources, slots.prompts, slots.places),
        (group.state, group.sources, group.prompts, group.places),
    )
    ended = state.outputs.ended
    rows = jnp.arange(ended.shape[0]) * num_slots // ended.shape[0]
    outputs = state.outputs.replace(ended=ended | ((rows == slot) & ~is_there))
    is_freed = (jnp.arange(num_slots) == slot) & ~is_there
    slots = slots.replace(
        state=state.replace(outputs=outputs, pace=slots.state.pace),
        sources=sources,
        prompts=prompts,
        places=jnp.where(is_freed, EMPTY_SLOT, places),
    )
    return carry.replace(slots=slots, taken=carry.taken + is_there)


def _cleared(state: DecodeState, slot: Int[Array, ""], num_slots: int) -> DecodeState:
    """Zeroes a slot whose numbers are not finite.

    What a cache holds beyond a row's length has no weight, but zero times infinity is NaN.
    """
    computed = state.outputs.scores + state.stats.beta_sum
    is_bad = ~jnp.all(jnp.isfinite(computed.reshape(num_slots, -1)[slot]))

    def clear(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        each = leaf.shape[0] // num_slots
        zeros = jnp.zeros((each, *leaf.shape[1:]), leaf.dtype)
        return lax.dynamic_update_slice_in_dim(leaf, zeros, slot * each, axis=0)

    return decode_state.if_wanted(is_bad, lambda state: jax.tree.map(clear, state), state)
