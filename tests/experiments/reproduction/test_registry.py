"""All items together: they can be planned, and the quick run is one."""

import pytest

from spec_t5x.experiments.reproduction import pairs, registry
from spec_t5x.experiments.reproduction.cache import Cache
from spec_t5x.experiments.reproduction.items import Setting
from spec_t5x.experiments.reproduction.runner import make_plan

PAPER = [f"table{n}" for n in range(1, 6)] + [f"figure{n}" for n in range(1, 6)]


def test_every_pair_and_its_drafts_are_packaged():
    # Absence would shorten the report.
    assert pairs.present(("unigram", "bigram", "ngram", "transformer")) == list(pairs.PAIRS)


def test_the_papers_tables_and_figures_come_first_and_in_order():
    names = [item.name for item in registry.ITEMS]
    assert names[:10] == PAPER
    assert len(set(names)) == len(names) and registry.ALL not in names
    assert registry.select(["all"]) == registry.ITEMS
    assert [item.name for item in registry.select(["figure2", "table1"])] == ["table1", "figure2"]


# Memory is estimated by tracing: JAX then puts shapes where the hook wants arrays.
@pytest.mark.usefixtures("unchecked")
def test_all_can_be_planned_and_the_quick_run_is_estimated_at_less_than_ten_minutes(tmp_path):
    cache = Cache(tmp_path, {})
    quick, full = (make_plan(registry.ITEMS, Setting(quick=q), cache) for q in (True, False))
    for plan in (quick, full):
        assert plan.broken == {}
        # What is borrowed is somebody's.
        assert {name for names in plan.borrowed.values() for name in names} <= set(plan.parts)
        assert all(part.seconds > 0 for part in plan.parts.values())
    assert quick.seconds < 600 < full.seconds
    assert quick.sentence().startswith("the quick run takes about ")
    shared = quick.parts.keys() & full.parts.keys()
    assert any(quick.parts[name].inputs != full.parts[name].inputs for name in shared)
