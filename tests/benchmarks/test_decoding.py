"""``benchmarks.decoding``: mistakes, and programs that fail (``test_measure.py`` runs it)."""

import contextlib
import json

import jax
import pytest

from benchmarks import decoding, random_pair
from spec_t5x.labs.benchmark import random_models
from tests.toy_t5 import tiny_t5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1", "0"], "batch is 0: give at least 1"),
        (["--gamma", "-1"], "gamma is -1: give at least 0"),
        (["--repeats", "0"], "repeats is 0: give at least 1"),
        (["--alpha", "2"], "alpha is 2.0: give an acceptance rate from 0 to 1"),
        (["--draft", "byt5_small"], "draft byt5_small has 384 tokens and target t5_1_1_xl 32128"),
    ],
)
def test_mistakes_are_a_line(arguments, message, capsys):
    assert decoding.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"decoding: error: {message}")


@pytest.fixture
def failing(tmp_path, monkeypatch, quick_compilation):
    """Provides ``run(*flags)``: decodes a toy plainly, which fails or is stopped; returns rows."""
    for module in (random_pair, random_models):
        monkeypatch.setattr(module, "size", lambda name: tiny_t5(0, vocab_size=64).config)
    kept, sizes = tmp_path / "kept.json", ("--source_len", "8", "--max_decode_len", "4")

    def run(*flags):
        given = ["--gamma", "0", "--by", "XLA", *sizes, *flags, "--json", str(kept)]
        with contextlib.suppress(SystemExit):
            assert decoding.main(given) == 2
        return json.loads(kept.read_text())["rows"]

    return run


def test_a_profile_that_fails_loses_no_times(failing, monkeypatch, capsys):
    def unrecorded(*arguments):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(decoding._Call, "kernels", unrecorded)
    (row,) = failing("--profile")
    assert row["seconds"] and "kernels" not in row
    error = capsys.readouterr().err
    assert "batch 1, gamma 0 by XLA ran, and their kernels were not recorded (no CUPTI)" in error


@pytest.mark.parametrize("end", [RuntimeError("no CUPTI"), SystemExit("stopped")], ids=repr)
def test_programs_are_profiled_after_all_were_timed(failing, monkeypatch, end):
    done, run = [], decoding._Call._run

    def recorded(call, program):
        done.append("profile")
        if call.batch == 2:
            raise end
        return [{"name": "a kernel"}]

    def timed(call, *arguments):
        done.append("time")
        return run(call, *arguments)

    monkeypatch.setattr(decoding._Call, "kernels", recorded)
    monkeypatch.setattr(decoding._Call, "_run", timed)
    rows = failing("--batch", "1", "2", "--repeats", "1", "--profile")
    # Two rounds of each batch, a decoding and a prefill each.
    assert done == ["time"] * 8 + ["profile"] * 2
    assert [row.get("kernels") for row in rows] == [[{"name": "a kernel"}], None]


@pytest.mark.parametrize("from_round", [0, 1])
def test_programs_without_memory_are_named_after_the_other_rows(
    from_round, failing, monkeypatch, capsys
):
    run = decoding._Call._run

    def limited(call, program, number, steps):
        if call.batch > 1 and number >= from_round:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: at batch {call.batch}")
        return run(call, program, number, steps)

    monkeypatch.setattr(decoding._Call, "_run", limited)
    assert [row["batch"] for row in failing("--batch", "2", "1", "3")] == [1]
    shown = capsys.readouterr()
    for batch in (2, 3):
        named = f"batch {batch}, gamma 0 by XLA cannot be compiled or run"
        assert f"{named} (RESOURCE_EXHAUSTED: at batch {batch})" in shown.err
    assert "tokens/s" in shown.out


def test_a_wrong_kernel_after_which_every_program_fails_loses_no_rounds(
    failing, tmp_path, monkeypatch, capsys
):
    run, runs, kept_before = decoding._Call._run, [], {}

    def wrong(call, program, number, steps):
        runs.append(call.batch)
        kept_before.setdefault(call.batch, (tmp_path / "kept.json").exists())
        # Six rounds of a batch, a decoding and a prefill each; three of the next, and a decoding.
        if len(runs) > 19:
            raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return run(call, program, number, steps)

    monkeypatch.setattr(decoding._Call, "_run", wrong)
    rows = failing("--batch", "1", "2", "3")
    assert [(row["batch"], len(row["seconds"])) for row in rows] == [(1, 5), (2, 2)]
    assert capsys.readouterr().err.count("CUDA_ERROR_ILLEGAL_ADDRESS") == 1
    # Also a kernel that never ends loses none: its program is killed.
    assert kept_before == {1: False, 2: True, 3: True}
