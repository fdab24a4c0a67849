"""How busy other programs keep the processors: what is timed beside them is not what it costs."""

import time

import psutil

# From this share on, timings are not to be relied on.
MUCH = 0.15


class OtherPrograms:
    """A count of what other programs use, from when it is made."""

    def __init__(self):
        self._began, self._used = time.monotonic(), _used_by_others()

    @property
    def share(self) -> float:
        """The part of all processors' time that others have used, from 0 to 1."""
        seconds = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return min(max((_used_by_others() - self._used) / max(seconds, 1e-9), 0.0), 1.0)


def _used_by_others() -> float:
    """Seconds of processors since the machine started."""
    times = psutil.cpu_times()
    # Where there is no such time, none of it: that of low priority, and of other guests.
    more = sum(getattr(times, name, 0.0) for name in ("nice", "steal"))
    busy = times.user + times.system + more
    return busy - time.process_time()
