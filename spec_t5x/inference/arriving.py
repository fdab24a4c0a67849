"""Lines of a stream as they are written to it, for answers before its end."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator

# Lines that are read ahead, and seconds in which lines that were written together arrive.
_READ_AHEAD = 4096
_TOGETHER = 0.02


def arriving(stream: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines of a stream: those that are there, then those that arrived meanwhile."""
    # None is the end.
    waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=_READ_AHEAD)

    def read() -> None:
        for line in stream:
            waiting.put(line)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    line = waiting.get()
    while line is not None:
        # Lines that are written at once need not arrive at once.
        time.sleep(_TOGETHER)
        part = [line]
        while not waiting.empty() and (line := waiting.get()) is not None:
            part.append(line)
        yield part
        if line is not None:
            line = waiting.get()
