"""Copying, measured against references."""

import jax.numpy as jnp
import pytest

from spec_t5x.experiments import copying
from spec_t5x.experiments.copying import ReferenceTarget, measure
from spec_t5x.interfaces import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_a_reference_that_is_its_source_takes_few_calls():
    """5, then 6 7 8 9 and 4 in one call, then the end."""
    text = [5, 6, 7, 8, 9, 4, 1]
    row = measure([(text, text)], vocab_size=12, gamma=4, min_match=1)
    assert row.block_efficiency == pytest.approx(7 / 3)
    assert row.acceptance == 1
    assert row.proposed_per_call == pytest.approx((0 + 4 + 1) / 3)


def test_a_reference_without_the_sources_words_gets_no_proposal():
    row = measure([([5, 6, 1], [7, 8, 9, 1])], vocab_size=12, gamma=4, min_match=1)
    assert (row.block_efficiency, row.proposed_per_call) == (1.0, 0.0)


def test_the_target_writes_the_reference_whatever_it_is_fed():
    target = ReferenceTarget(12)
    assert isinstance(target, Target)
    cache = target.prefill(
        {"source": jnp.zeros((1, 1), int), "reference": jnp.array([[3, 4, 1]])}, 9
    )
    logits, cache = target.score(cache, jnp.array([[0, 9]]))
    assert jnp.argmax(logits, -1).tolist() == [[3, 4]]
    logits, _ = target.score(target.rollback(cache, jnp.array([1])), jnp.array([[9, 9, 9]]))
    # Beyond the reference there is its end again.
    assert jnp.argmax(logits, -1).tolist() == [[4, 1, 1]]


def test_the_command_prints_a_row_for_each_setting(capsys, tmp_path):
    data = tmp_path / "pairs.tsv"
    data.write_text("the small red house\tred house\na green bird\ta bird\n", encoding="utf-8")
    arguments = ["--data", str(data), "--gamma", "2", "--min_match", "1", "2"]
    assert copying.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in lines[2:]] == [[" 2 ", " 1 "], [" 2 ", " 2 "]]
