"""Streaming: one input is decoded call by call, with an event for each target call."""

import dataclasses
import time
from collections.abc import Iterator

from spec_t5x.generation.answers import Generation
from spec_t5x.generation.batches import Batch
from spec_t5x.generation.engine import Engine
from spec_t5x.generation.stop_strings import first_stop, settled


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """The tokens of one target call: a line of Figure 1."""

    # Output so far, without an end that may still change: an incomplete character, the beginning of
    # a stop string, a word if the space before it may be removed. The last event has all of it.
    text: str
    # Ids that the draft proposed; none in a plain step.
    proposed: list[int]
    # Number of leading proposals that entered the output.
    num_accepted: int
    # The target's own token after the accepted proposals: a correction, or a further token if all
    # were accepted. None if the output ended inside the accepted proposals.
    own: int | None
    # Target calls so far, this one included.
    target_calls: int
    # Seconds of decoding so far, without the caller's time between events, and the prefill's part
    # of these. Compilation is included.
    seconds: float
    prefill_seconds: float
    # The output with its score and counts; None before the last event.
    generation: Generation | None = None

    @property
    def accepted(self) -> list[int]:
        """Ids of the proposals that entered the output."""
        return self.proposed[: self.num_accepted]

    @property
    def rejected(self) -> list[int]:
        """Ids of the rejected proposals, the first of which ``own`` replaces."""
        return [] if self.own is None else self.proposed[self.num_accepted :]

    @property
    def appended(self) -> list[int]:
        """Ids that this call appended to the output."""
        return self.accepted if self.own is None else [*self.accepted, self.own]


def stream(engine: Engine, batch: Batch) -> Iterator[StreamEvent]:
    """Yields ``Generator.stream``'s events for one input. The prefill has run at the call."""
    began = time.perf_counter()
    return _events(engine, engine.steps(batch), time.perf_counter() - began)


def _events(engine: Engine, steps, prefill: float) -> Iterator[StreamEvent]:
    stop, vocabulary = engine.options.stop, engine.decoder.vocabulary
    decode, seconds = vocabulary.decode, prefill
    ids, calls, generation = engine.decoder.prefix_ids(engine.options), 0, None
    given = len(ids)
    while generation is None:
        began = time.perf_counter()
        iteration = next(steps)
        seconds += time.perf_counter() - began
        calls += 1
        new = iteration.appended[0, : iteration.num_appended[0]].tolist()
        stopped = first_stop(decode, ids, new, stop, given)
        if stopped is not None:
            new = new[: stopped.count]
        ids.extend(new)
        if stopped is not None or iteration.ended[0]:
            try:
                steps.send(True)
            except StopIteration as end:
                answer = end.value
            # Raises an answer's error, of which StopIteration is no context here.
            (generation,) = answer
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
