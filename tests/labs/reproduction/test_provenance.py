"""Commit, machine and versions of a run."""

import re
import subprocess

from spec_t5x.labs.reproduction import provenance
from spec_t5x.labs.reproduction.contents import ReproduceOptions


def git(folder, *arguments):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def test_the_commit_is_told_with_changes(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(provenance, "_CHECKOUT", checkout)
    assert provenance.commit() is None

    git(checkout, "init")
    (checkout / "file").write_text("1")
    git(checkout, "add", "file")
    git(checkout, "commit", "-m", "first")
    git(checkout, "tag", "v1")
    head = git(checkout, "rev-parse", "HEAD")
    assert provenance.commit() == head[:12]
    (checkout / "file").write_text("2")
    assert provenance.commit() == f"{head[:12]}+changes"

    # Installed in a folder of somebody else's repository.
    inside = checkout / "site-packages"
    inside.mkdir()
    monkeypatch.setattr(provenance, "_CHECKOUT", inside)
    assert provenance.commit() is None


def test_machine_versions_and_date():
    origin = provenance.origin(ReproduceOptions(seed=3, data_dir="/home/me/texts"))
    machine = origin["machine"]
    assert machine["platform"] == "cpu" and machine["threads"] >= 1 and machine["processor"]
    assert re.match(r"\d+\.\d+", machine["jax"])
    assert (origin["seed"], origin["quick"], origin["data_dir"]) == (3, False, "texts")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", provenance.now())


def test_durations_are_told_as_people_do():
    told = [provenance.duration(seconds) for seconds in (0.2, 40, 89, 91, 2880, 4200, 9000)]
    assert told == ["1 s", "40 s", "89 s", "2 min", "48 min", "70 min", "2 h 30 min"]


def test_results_of_several_commits_are_told_apart():
    def found(commit, tokens, date):
        machine = {"device": "cpu", "platform": "cpu", "processor": "X", "threads": 2}
        origin = {"machine": machine, "commit": commit, "seed": 1, "seconds": 70.0}
        origin |= {"date": f"{date} 10:00:00 UTC"}
        return {"result": {"tokens": tokens}, "provenance": origin}

    lines = provenance.lines(
        [
            found("abc", 1000, "2025-01-02"),
            found("abc", 234, "2025-01-01"),
            found(None, 5, "2025-01-03"),
        ]
    )
    assert lines == [
        "X, 2 cores (cpu), commit abc, seed 1, 1,234 tokens counted, 2025-01-01 to 2025-01-02, "
        "took 2 min",
        "X, 2 cores (cpu), not from a checkout, seed 1, 5 tokens counted, 2025-01-03, took 70 s",
    ]
