"""Pictures of figures, and commands that draw them."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["plot_growth", "plot_trace", "plot_training"])
def test_a_flag_is_not_a_file_to_write(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flag, status in (("--help", 0), ("--nothing", 2)):
        monkeypatch.setattr(sys, "argv", [name, flag])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        assert ended.value.code == status
    assert f"usage: python -m benchmarks.{name} [-h]" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
