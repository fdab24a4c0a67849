"""One input decoded call by call: an event for each call of the target."""

import dataclasses
import time
from collections.abc import Callable, Iterator

from spec_t5x.generation.answers import Generation
from spec_t5x.generation.batches import Batch
from spec_t5x.generation.engine import Engine
from spec_t5x.generation.stop_strings import first_stop, settled


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """The tokens of one target call: a line of Figure 1."""

    # The output so far, without what may still change at its end: a character whose last bytes
    # are to come, or the beginning of a stop string. The last event has all of it.
    text: str
    # Ids that the draft proposed; none in a plain step.
    proposed: list[int]
    # The number of proposals, from the first, that entered the output.
    num_accepted: int
    # The target's own token that follows: the correction of the first refused proposal, or one
    # more if all were accepted. None if the output ended inside the accepted proposals.
    own: int | None
    # The number of calls so far, with this one.
    target_calls: int
    # Time of decoding so far, without the caller's time between events, and the prefill's part of
    # it. Compilation counts.
    seconds: float
    prefill_seconds: float
    # The whole output and its counts, in the last event.
    generation: Generation | None = None

    @property
    def accepted(self) -> list[int]:
        """The proposals that entered the output."""
        return self.proposed[: self.num_accepted]

    @property
    def rejected(self) -> list[int]:
        """The proposals that the target refused, of which ``own`` corrects the first."""
        return [] if self.own is None else self.proposed[self.num_accepted :]

    @property
    def appended(self) -> list[int]:
        """The tokens that the output grew by."""
        return self.accepted if self.own is None else [*self.accepted, self.own]


def stream(engine: Engine, batch: Batch, ended: Callable[[], None]) -> Iterator[StreamEvent]:
    """Yields the events of ``Generator.stream`` for a batch of one input; calls ``ended`` last."""
    stop, vocabulary = engine.options.stop, engine.decoder.vocabulary
    decode = vocabulary.decode
    began = time.perf_counter()
    steps = engine.steps(batch)
    prefill = seconds = time.perf_counter() - began
    ids, calls, generation = engine.decoder.prefix_ids(engine.options), 0, None
    while generation is None:
        began = time.perf_counter()
        iteration = next(steps)
        seconds += time.perf_counter() - began
        calls += 1
        new = iteration.appended[0, : iteration.num_appended[0]].tolist()
        stopped = first_stop(decode, ids, new, stop)
        if stopped is not None:
            new = new[: stopped.count]
        ids.extend(new)
        if stopped is not None or iteration.ended[0]:
            try:
                steps.send(True)
            except StopIteration as end:
                (generation,) = end.value
            ended()
        text = settled(decode(ids), stop)
        if vocabulary.cleans_up:
            # Later tokens may remove the space before the last word.
            text = text.rpartition(" ")[0]
        accepted = min(int(iteration.num_accepted[0]), len(new))
        yield StreamEvent(
            text=text if generation is None else generation.output,
            proposed=iteration.proposed[0, : iteration.num_proposed[0]].tolist(),
            num_accepted=accepted,
            own=new[accepted] if accepted < len(new) else None,
            target_calls=calls,
            seconds=seconds,
            prefill_seconds=prefill,
            generation=generation,
        )
