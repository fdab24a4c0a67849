"""Paths that begin with ``~``: no shell expands one after ``=``, or inside quotes."""

import gin
import pytest

from tests.cli.results import assert_refused

FIRST, DRAFT = (
    f"--gin_file=gin_configs/runs/{name}.gin" for name in ("first_training", "distill_draft")
)
DISTILLED = ("--gin.CHECKPOINT_PATH=t5-target", "--gin.DEV_FILE=dev.tsv")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("train", FIRST, "--gin.DATA_DIR='~'", "--gin.OUTPUT_DIR='~/file/run'"), "file"),
        (("train", FIRST, "--gin.DATA_DIR='~'", "--gin.OUTPUT_DIR='~/run'"), "train.tsv"),
        (("distill", DRAFT, "--gin.DATA_DIR=~", "--gin.OUTPUT_DIR=~/file/run", *DISTILLED), "file"),
        (("train-ngram", "--data=x", "--vocabulary=t5-target", "--output=~/file/made"), "file"),
        (("train-ngram", "--data=x", "--vocabulary=~/absent:7", "--output=made"), "absent"),
        (("train-ngram", "--data=~/x", "--vocabulary=t5-target", "--output=made"), "x"),
        (("reproduce", "factors", "--output=~/file/made"), "file"),
        (("reproduce", "figure1", "--output=made", "--data_dir=~/absent"), "absent"),
        (("reproduce", "public", "--output=made", "--pairs=~/absent.json"), "absent.json"),
        (("acceptance", "--json=~/file/made.json"), "file"),
        (("evaluate", "--data=~/absent.tsv"), "absent.tsv"),
        (("generate", "--input=~/absent.txt"), "absent.txt"),
        (("generate", "--vocabulary=~/absent.json", "x"), "absent.json"),
    ],
)
def test_a_path_is_in_the_home_folder(arguments, named, run, tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    said = run(*arguments)
    assert said.status == 2
    assert str(home / named) in said.errors[-1]
    assert not list(here.iterdir())


def test_a_gin_file_and_its_folder_are_in_the_home_folder(run, tmp_path, monkeypatch):
    (tmp_path / "mine.gin").write_text("GenerateOptions.gamma = -7\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    for flags in (("--gin_file=~/mine.gin",), ("--gin_search_paths=~", "--gin_file=mine.gin")):
        with gin.unlock_config():
            said = run("generate", *flags, "x")
        assert (said.status, "gamma is -7" in said.errors[-1]) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--target=~nobody-here/model", "x"),
        ("generate", "--input=~nobody-here/texts.txt"),
        ("generate", "--vocabulary=~nobody-here/tokenizer.json", "x"),
        ("generate", "--gin_file=~nobody-here/mine.gin", "x"),
        ("infer", "--output_dir=~nobody-here/run", "--input=x"),
        ("train", FIRST, "--gin.DATA_DIR='x'", "--gin.OUTPUT_DIR='~nobody-here/run'"),
        ("train-ngram", "--data=x", "--vocabulary=t5-target", "--output=~nobody-here/made"),
        ("reproduce", "factors", "--output=~nobody-here/made"),
        ("acceptance", "--json=~nobody-here/made.json"),
    ],
)
def test_a_home_folder_of_nobody_is_one_line(arguments, run):
    assert_refused(run(*arguments), "names no home directory")
