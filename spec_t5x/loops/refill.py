"""Refill: rows of a batch take the next input as soon as they have ended.

A batch runs until its slowest row has ended. Here the loop stops whenever an input has ended,
keeps its outputs and gives its *slot*, the ``num_decodes`` rows it had, to the next one. What waits
is a *group* of inputs whose encoder has run. A *burst* is one program: it decodes until the group
is used up and a slot is free. The host then hands in the next group. The device never idles: the
host encodes the next group and fetches outputs meanwhile.

Rows do not see one another, so that an input gets the output that it gets in any other batch. What
is decoded when follows from the inputs alone: with a pace, whose decisions are for all rows, the
same inputs give the same bytes.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
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

# The place, among all inputs, of a slot that holds none.
EMPTY_SLOT = -1


@flax.struct.dataclass(kw_only=True)
class Move:
    """An input of one batch that takes the place of an input of another.

    Arrays of either batch have one row for each input, or ``num_decodes``, which follow one
    another.
    """

    # Places of the two, and the number of inputs where it comes from.
    source: Int[Array, ""]
    to: Int[Array, ""]
    num_sources: int = flax.struct.field(pytree_node=False)

    def beginning(self, kept: Array, new: Array) -> Array:
        """``kept`` with the input's rows of ``new``, which may be shorter: the rest stays."""
        rows = self._rows(new)
        starts = (self.to * rows.shape[0], *(jnp.zeros_like(self.to) for _ in kept.shape[1:]))
        return lax.dynamic_update_slice(kept, rows, starts)

    def whole(self, kept: Array, new: Array) -> Array:
        """``kept`` with the input's rows of ``new``, which zeros make as long."""
        lengths = zip(kept.shape[1:], new.shape[1:], strict=True)
        missing = [(0, wanted - there) for wanted, there in lengths]
        if not any(after for _, after in missing):
            return self.beginning(kept, new)
        alone = self.replace(source=jnp.zeros_like(self.source), num_sources=1)
        return alone.beginning(kept, jnp.pad(self._rows(new), ((0, 0), *missing)))

    def of_all(self, kept: PyTree, new: PyTree) -> PyTree:
        """``whole`` of all leaves; a node with ``insert_rows(new, move)`` sees to it itself."""

        def move(kept, new):
            own = getattr(kept, "insert_rows", None)
            return self.whole(kept, new) if own is None else own(new, self)

        return jax.tree.map(move, kept, new, is_leaf=lambda node: hasattr(node, "insert_rows"))

    def _rows(self, new: Array) -> Array:
        each = new.shape[0] // self.num_sources
        return lax.dynamic_slice_in_dim(new, self.source * each, each)


@flax.struct.dataclass(kw_only=True)
class Members:
    """Inputs that were encoded together, ready to be decoded: in slots, or waiting for one."""

    # The loop's; of those that wait, without a pace, and with room for their prompts alone.
    state: DecodeState
    # What the draft's state is made from, where the pace decides when.
    sources: PyTree
    prompts: Int[Array, "inputs width"]
    # The place of each input among all; ``EMPTY_SLOT`` in a free slot, and for padding, which is
    # last.
    places: Int[Array, "inputs"]


@flax.struct.dataclass(kw_only=True)
class Slots:
    """The rows being decoded, from burst to burst."""

    members: Members
    # Whether all of them have the draft's state; not where the pace takes plain steps.
    drafting: Bool[Array, ""]


@flax.struct.dataclass(kw_only=True)
class Ended:
    """What a burst has finished."""

    # The place of each output's input among all; ``EMPTY_SLOT`` beyond those that ended.
    places: Int[Array, "inputs"]
    decoded: Decoded
    # Target calls of the burst; each is for all rows.
    calls: Int[Array, ""]


@flax.struct.dataclass(kw_only=True)
class _Burst:
    """What the loop carries."""

    slots: Slots
    group: Members
    # Members of the group that have had a slot.
    taken: Int[Array, ""]
    # Outputs and statistics of the rows that ended, and how many inputs they belong to.
    outputs: Outputs
    stats: PyTree
    places: Int[Array, "inputs"]
    num_ended: Int[Array, ""]
    calls: Int[Array, ""]

    @property
    def state(self) -> DecodeState:
        return self.slots.members.state

    def with_state(self, state, **changes) -> "_Burst":
        members = self.slots.members.replace(state=state)
        return self.replace(slots=self.slots.replace(members=members), **changes)

    @property
    def is_used(self) -> Bool[Array, "slots"]:
        return self.slots.members.places != EMPTY_SLOT

    @property
    def has_ended(self) -> Bool[Array, "slots"]:
        """Slots whose input has ended."""
        ended = self.state.outputs.ended.reshape(self.is_used.shape[0], -1).all(axis=1)
        return self.is_used & ended

    @property
    def num_waiting(self) -> Int[Array, ""]:
        return jnp.sum(self.group.places != EMPTY_SLOT) - self.taken


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
    """Encodes inputs and feeds their prompts.

    Args:
      target, draft: the models; without a draft decoding is plain, and ``loop.gamma`` 0.
      sources: what both models' ``prefill`` take.
      prompts: the start token first, as of ``speculative_decode``.
      keys: one for each input.
      max_decode_steps: tokens to generate at most; 0 of padding.
      places: of the inputs among all; ``EMPTY_SLOT`` of padding, which comes last.
      loop: what is compiled for.
      paced: whether a pace decides when the draft's state is made.
      waits: whether the inputs wait for slots, and their caches have room for the prompts alone.
        Sources and prompts may be shorter than those in the slots.
    """
    decodes, room = loop.num_decodes, prompts.shape[1] if waits else None
    stream = outputs_lib.row_stream(
        keys, prompts.shape[0], decodes, loop.verifier.coupled, loop.max_decode_len
    )
    arguments = sources, prompts, stream
    options = {"max_decode_steps": max_decode_steps, "room": room}
    draft = draft or NoDraft(target.vocab_size)
    state = decode_state.init(target, draft, *arguments, loop, **options)
    if paced:
        # Zeros in place of the unused state, so that XLA drops the draft's prefill.
        zeros = jax.tree.map(jnp.zeros_like, state.draft_state)
        state = state.replace(draft_state=zeros)
    return spread_rows(Members(state=state, sources=sources, prompts=prompts, places=places))


def fill(members: Members, pace: Pace | None = None) -> Slots:
    """Slots of the first inputs, which do not wait; no later ones have longer sources."""
    if pace is not None:
        # Copied: slots are donated, and this pace is the caller's.
        pace = jax.tree.map(jnp.copy, pace)
        members = members.replace(state=members.state.replace(pace=pace))
    return Slots(members=members, drafting=jnp.asarray(pace is None))


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

    Args:
      target, draft: as of ``prepare``.
      slots: donated.
      group: what waits; it may be all padding.
      settings: the distribution to sample from, the same for all inputs.
      drain: whether to go on until every slot is free.
      loop: as of ``prepare``.
    """
    if loop.verifier.coupled:
        settings = settings.keep_ties()
    run = _BurstLoop(target, draft or NoDraft(target.vocab_size), settings, loop)
    carry = run.begin(slots, group)

    def unfinished(carry: _Burst) -> Bool[Array, ""]:
        return jnp.all(carry.is_used) | (drain & jnp.any(carry.is_used))

    carry = lax.while_loop(
        unfinished, lambda carry: _refilled(run.until_one_ends(carry)), _refilled(carry)
    )
    return run.end(carry)


class _BurstLoop:
    """The loop of a burst, plain or speculative."""

    def __init__(self, target: Target, draft: Draft, settings: Sampling, loop: Loop):
        self.target, self.draft, self.settings, self.loop = target, draft, settings, loop

    def begin(self, slots: Slots, group: Members) -> _Burst:
        """What the burst starts with; at a pace, with the draft made ready if it is wanted."""
        state, num = slots.members.state, slots.members.places.shape[0]
        # One more is written to where no input has ended.
        capacity = num + group.places.shape[0] + 1

        def room(leaf):
            return jnp.zeros((capacity * (leaf.shape[0] // num), *leaf.shape[1:]), leaf.dtype)

        carry = _Burst(
            slots=slots,
            # Any device may fill a slot with any of them: gathered once, not for each slot.
            group=gather_rows(group),
            taken=jnp.int32(0),
            outputs=jax.tree.map(room, state.outputs),
            stats=jax.tree.map(room, state.stats),
            places=jnp.full(capacity, EMPTY_SLOT, jnp.int32),
            num_ended=jnp.int32(0),
            calls=jnp.int32(0),
        )
        if carry.state.pace is None:
            return carry
        carry = carry.with_state(state.replace(pace=state.pace.new_batch()))
        wanted = carry.state.pace.limit() > 0
        drafting = carry.slots.drafting & wanted
        carry = carry.replace(slots=carry.slots.replace(drafting=drafting))
        return decode_state.if_wanted(wanted, self._make_ready, carry)

    def until_one_ends(self, carry: _Burst) -> _Burst:
        """The loop of decoding, until an input ends."""
        return speculative.drive(
            carry,
            lambda carry: ~jnp.any(carry.has_ended),
            lambda carry: carry.state.pace,
            self._iterate,
            self._make_ready,
            self.loop,
        )

    def end(self, carry: _Burst) -> tuple[Slots, Ended]:
        """The slots as the next burst takes them, and what this one has finished."""
        pace, members = carry.state.pace, carry.slots.members
        # As ``prepare`` left them: the next burst is the same program.
        members = spread_rows(members.replace(state=members.state.replace(pace=None)))
        if pace is not None:
            pace = pace.end_batch()
            members = members.replace(state=members.state.replace(pace=pace))
        decoded = outputs_lib.finish(
            carry.outputs,
            self.loop.num_decodes,
            self.loop.max_decode_len,
            None if isinstance(self.draft, NoDraft) else carry.stats,
            pace,
        )
        slots = carry.slots.replace(members=members)
        return slots, Ended(places=carry.places, decoded=decoded, calls=carry.calls)

    def _iterate(self, carry: _Burst, loop: Loop) -> _Burst:
        state, _ = speculative.step(self.target, self.draft, carry.state, self.settings, loop)
        return carry.with_state(state, calls=carry.calls + 1)

    def _make_ready(self, carry: _Burst) -> _Burst:
        """Brings the draft up to the slots' texts, and makes its state for those that wait."""
        draft, loop, group = self.draft, self.loop, carry.group
        slots, members = carry.slots, carry.slots.members
        waiting = decode_state.if_wanted(
            ~carry.state.pace.prefilled,
            lambda _: decode_state.prefill_draft(
                draft, group.sources, group.prompts, loop, group.prompts.shape[1]
            ),
            group.state.draft_state,
        )
        state = speculative.prepare(
            draft,
            members.sources,
            members.prompts,
            members.state,
            self.settings,
            loop,
            has_state=slots.drafting,
        )
        group = group.replace(state=group.state.replace(draft_state=gather_rows(waiting)))
        slots = slots.replace(drafting=jnp.asarray(True))
        return carry.replace(slots=slots, group=group).with_state(state)


def _refilled(carry: _Burst) -> _Burst:
    """Takes out what has ended and fills free slots, one after the other."""

    def wanting(carry: _Burst) -> Bool[Array, "slots"]:
        return carry.has_ended | (~carry.is_used & (carry.num_waiting > 0))

    def refill(carry: _Burst) -> _Burst:
        slot = jnp.argmax(wanting(carry)).astype(jnp.int32)
        return _filled(_taken_out(carry, slot), slot)

    return lax.while_loop(lambda carry: jnp.any(wanting(carry)), refill, carry)


def _taken_out(carry: _Burst, slot: Int[Array, ""]) -> _Burst:
    """Keeps the outputs of a slot; those of a free one are overwritten by the next."""
    places = carry.slots.members.places
    move = Move(source=slot, to=carry.num_ended, num_sources=places.shape[0])
    outputs, stats = move.of_all(
        (carry.outputs, carry.stats), (carry.state.outputs, carry.state.stats)
    )
    return carry.replace(
        outputs=outputs,
        stats=stats,
        places=carry.places.at[carry.num_ended].set(places[slot]),
        num_ended=carry.num_ended + (places[slot] != EMPTY_SLOT),
    )


def _filled(carry: _Burst, slot: Int[Array, ""]) -> _Burst:
    """Gives a slot to the next that waits; it is free where none does."""
    group, members = carry.group, carry.slots.members
    last = group.places.shape[0] - 1
    source = jnp.minimum(carry.taken, last)
    move = Move(source=source, to=slot, num_sources=last + 1)
    state = _cleared(members.state.replace(pace=None), slot, members.places.shape[0])
    moved = move.of_all(members.replace(state=state), group)
    is_there = carry.num_waiting > 0
    outputs = moved.state.outputs
    rows = jnp.arange(outputs.ended.shape[0]) * members.places.shape[0] // outputs.ended.shape[0]
    outputs = outputs.replace(ended=outputs.ended | ((rows == slot) & ~is_there))
    state = moved.state.replace(outputs=outputs, pace=members.state.pace)
    place = jnp.where(is_there, group.places[source], EMPTY_SLOT)
    members = moved.replace(state=state, places=moved.places.at[slot].set(place))
    return carry.replace(slots=carry.slots.replace(members=members), taken=carry.taken + is_there)


def _cleared(state, slot: Int[Array, ""], num_slots: int):
    """The state with zeros in a slot whose numbers are not finite.

    What a cache holds beyond a row's length has no weight, but nothing times infinity is NaN.
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
