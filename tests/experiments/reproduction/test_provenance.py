"""Commit, machine and versions of a run."""

import re
import subprocess

from spec_t5x.experiments.reproduction import provenance


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


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() is None


def test_machine_versions_and_date():
    machine = provenance.describe_machine()
    assert machine["platform"] == "cpu" and machine["cores"] >= 1 and machine["processor"]
    assert re.match(r"\d+\.\d+", provenance.versions()["jax"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", provenance.now())
