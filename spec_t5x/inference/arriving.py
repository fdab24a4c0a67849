"""Lines of a stream as they arrive, for answers before its end."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator

# Lines that are read ahead, and seconds within which lines written together arrive.
_READ_AHEAD = 4096
_TOGETHER = 0.02


def arriving(stream: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the lines of a stream: those there, then those arrived meanwhile; raises its error."""
    # The last item is None.
    waiting: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=_READ_AHEAD)

    def read() -> None:
        try:
            for line in stream:
                waiting.put(line)
            waiting.put(None)
        except Exception as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    line = waiting.get()
    while isinstance(line, bytes):
        # Lines that are written at once need not arrive at once.
        time.sleep(_TOGETHER)
        part = [line]
        while not waiting.empty() and isinstance(line := waiting.get(), bytes):
            part.append(line)
        yield part
        if isinstance(line, bytes):
            line = waiting.get()
    if line is not None:
        raise line
