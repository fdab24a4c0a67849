"""Exception on SIGTERM or SIGINT, so that a run stops at once and cleans up."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator


class Interrupted(KeyboardInterrupt):
    """Stop of a run by a signal; not an ``Exception``, so that ``except Exception`` misses it."""

    def __init__(self, number: int, how_far: str = ""):
        super().__init__(signal.Signals(number).name)
        self.number, self.how_far = number, how_far


@contextlib.contextmanager
def stopping(numbers: Collection[int] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[None]:
    """Makes signals raise ``Interrupted`` in the main thread within the ``with``.

    Where Python drops exceptions, as in the callback of a weak reference, the signal comes again.
    """
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

    def listen():
        return {number: signal.signal(number, stop) for number in heard}

    def dropped(unraisable):
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        listen()
        threading.Timer(0.1, os.kill, (os.getpid(), unraisable.exc_value.number)).start()

    received, hook = [], sys.unraisablehook
    sys.unraisablehook = dropped
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = listen()
    try:
        yield
    except Exception as error:
        # A callback from C++, as JAX has them, turns ``Interrupted`` into another exception.
        if received:
            raise Interrupted(received[0]) from error
        raise
    finally:
        restore()
        sys.unraisablehook = hook
