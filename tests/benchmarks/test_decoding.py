"""``benchmarks.decoding``: mistakes (``test_measure.py`` runs it)."""

import pytest

from benchmarks import decoding


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1", "0"], "batch is 0: give at least 1"),
        (["--gamma", "-1"], "gamma is -1: give at least 0"),
        (["--repeats", "0"], "repeats is 0: give at least 1"),
        (["--alpha", "2"], "alpha is 2.0: give an acceptance rate from 0 to 1"),
        (["--draft", "byt5_small"], "draft byt5_small has 384 tokens and t5_1_1_xl 32128"),
    ],
)
def test_mistakes_are_a_line(arguments, message, capsys):
    assert decoding.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"decoding: error: {message}")
