"""Cards of the packaged models: their commands exist, and a script compares their figures."""

import argparse
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS
from spec_t5x.labs.commands import evaluate as evaluate_command

REPOSITORY = Path(__file__).parents[2]
SCRIPT = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "scripts" / "check_cards.py")))
NAMES = {*PACKAGED_DRAFTS, *(name for kinds in PACKAGED_DRAFTS.values() for name in kinds.values())}
CARDS = {
    path.parent.name: path.read_text(encoding="utf-8")
    for path in sorted(PACKAGED_MODELS.glob("*/README.md"))
}

CARD = """# A draft

| text | pairs | alpha | block efficiency |
|---|---|---|---|
| dev, temperature 0 | 8 (2 left out as too long) | 0.706 (0.700–0.720) | 2.62 |
| dev, temperature 1 | 8 | 0.706 (0.700–0.720) | 2.62 (2.50–2.70) |

and measured, in `data`, by

```bash
spec-t5x evaluate --draft copy --temperature 0
spec-t5x evaluate --draft copy --temperature 1
```
"""


def test_every_packaged_model_has_a_card():
    assert set(CARDS) == NAMES
    for name, text in CARDS.items():
        assert text.startswith(f"# {name}: ")
        measured = "spec-t5x evaluate" in text
        assert (f"`python scripts/check_cards.py --data data {name}`" in text) == measured


@pytest.mark.parametrize("name", [name for name in CARDS if name != "lm-target"])
def test_measurements_are_commands_with_intervals(name):
    parser = argparse.ArgumentParser()
    evaluate_command.add_arguments(parser)
    for measurement in SCRIPT.read_card(CARDS[name]):
        args = parser.parse_args(shlex.split(measurement.arguments))
        assert args.target in PACKAGED_DRAFTS
        assert args.temperature in (0.0, 1.0)
        assert measurement.intervals
        for value, low, high in measurement.intervals.values():
            assert low <= value <= high


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Provides ``check(printed, *arguments)``: the script's status, if ``evaluate`` prints this."""
    (tmp_path / "models" / "a-draft").mkdir(parents=True)
    (tmp_path / "models" / "a-draft" / "README.md").write_text(CARD, encoding="utf-8")
    (tmp_path / "data").mkdir()
    names = SCRIPT.main.__globals__
    monkeypatch.setitem(names, "PACKAGED_MODELS", tmp_path / "models")

    def run(printed, *more, data="data"):
        monkeypatch.setitem(names, "evaluate", lambda arguments, folder: printed)
        return SCRIPT.main(["--data", str(tmp_path / data), *more])

    return run


def test_a_check_finds_what_is_outside_of_its_interval(check, capsys):
    figures = {"alpha": 0.7061, "block_efficiency": 2.6}
    assert check(figures) == 0
    assert capsys.readouterr().out.count("within") == 3
    assert check(figures | {"alpha": 0.7201}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("OUTSIDE" in line and "0.706 (0.7–0.72)" in line for line in lines) == 2
    assert check(figures, data="nowhere") == 2
    assert "nowhere: give --data one with the texts" in capsys.readouterr().err
    assert check(figures, "b-draft") == 2
    assert "no packaged model 'b-draft': choose of a-draft" in capsys.readouterr().err
    with pytest.raises(ValueError, match="2 rows, 1 commands"):
        SCRIPT.read_card(CARD.replace("spec-t5x evaluate --draft copy --temperature 1\n", ""))
