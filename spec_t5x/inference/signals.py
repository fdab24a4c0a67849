"""Exception on SIGTERM or SIGINT, so that a run stops at once and cleans up."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupted(BaseException):
    """Stop of a run by a signal; not an ``Exception``, so that ``except Exception`` misses it."""

    def __init__(self, number: int, how_far: str = ""):
        super().__init__(signal.Signals(number).name)
        self.number, self.how_far = number, how_far


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Makes SIGTERM and SIGINT raise ``Interrupted`` in the main thread within the ``with``."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers of signals.
        yield
        return

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number, frame):
        # A second signal has its usual effect, and interrupts the cleaning up.
        restore()
        received.append(number)
        raise Interrupted(number)

    received = []
    heard = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    except Exception as error:
        # A callback from C++, as JAX has them, turns ``Interrupted`` into another exception.
        if received:
            raise Interrupted(received[0]) from error
        raise
    finally:
        restore()
