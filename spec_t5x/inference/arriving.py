"""Lines of a stream in groups, as they arrive, so that they are answered before its end."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator

# Most lines of a group, and read ahead of it; seconds to wait for lines that were written together.
_READ_AHEAD = 4096
_TOGETHER = 0.02


def arriving(stream: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the lines of a stream in groups, as they arrive; raises the stream's ``Exception``."""
    # None marks the end of the stream.
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
        # Waits, because lines that are written together may arrive one by one.
        time.sleep(_TOGETHER)
        part = [line]
        while len(part) < _READ_AHEAD and not waiting.empty():
            if not isinstance(line := waiting.get(), bytes):
                break
            part.append(line)
        yield part
        if isinstance(line, bytes):
            line = waiting.get()
    if line is not None:
        raise line
