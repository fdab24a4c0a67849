"""What other programs use of the processors."""

import time
import types

import psutil
import pytest

from spec_t5x.labs.benchmark.other_programs import OtherPrograms


def test_what_others_use_counts_and_what_this_one_uses_does_not(monkeypatch):
    now = types.SimpleNamespace(wall=100.0, own=7.0, user=50.0, system=20.0)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(
        psutil, "cpu_times", lambda: types.SimpleNamespace(user=now.user, system=now.system)
    )
    monkeypatch.setattr(time, "monotonic", lambda: now.wall)
    monkeypatch.setattr(time, "process_time", lambda: now.own)
    others = OtherPrograms()
    now.wall, now.own, now.user, now.system = 105.0, 11.0, 58.0, 22.0
    # Of 10 seconds of two processors 10 were used, 4 of them by this process.
    assert others.share == pytest.approx(0.6)
    now.own = 25.0
    assert others.share == 0
