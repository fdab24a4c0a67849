"""Gin files of ``spec-t5x train`` and its like: the one that is needed, and another command's."""

import pytest

from spec_t5x.cli.main import main
from spec_t5x.labs.commands.train import TRAININGS
from tests.documents.test_commands import REPOSITORY

RUNS = REPOSITORY / "gin_configs" / "runs"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("command", "file", "other"),
    [
        ("train", "distill_draft", "spec-t5x distill"),
        # It includes the file that trains its target.
        ("train", "train_lm_draft", "spec-t5x distill"),
        ("distill", "first_training", "spec-t5x train"),
        ("distill", "train_lm_draft", None),
        ("train", "train", None),
    ],
)
def test_the_command_of_a_gin_file_is_named(command, file, other, capsys):
    path = RUNS / f"{file}.gin"
    assert main([command, f"--gin_file={path}"]) == 2
    message = capsys.readouterr().err
    assert (f"{path} is a file for {other}" if other else "needs the macro") in message


@pytest.mark.usefixtures("unchecked")
def test_a_file_may_be_of_several_commands(tmp_path, capsys):
    path = tmp_path / "both.gin"
    path.write_text("distill.output_dir = %A\ntrain.output_dir = %B\n")
    for command in ("distill", "train"):
        assert main([command, f"--gin_file={path}"]) == 2
        assert "needs the macro" in capsys.readouterr().err
    assert main(["train-heads", f"--gin_file={path}"]) == 2
    assert "is a file for spec-t5x train or spec-t5x distill" in capsys.readouterr().err


def test_the_help_names_a_file_whose_header_has_a_command():
    for name, training in TRAININGS.items():
        header = (RUNS / training.file).read_text(encoding="utf-8")
        assert f"#   spec-t5x {name} " in header and f"gin_configs/runs/{training.file}" in header
