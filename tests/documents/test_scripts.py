"""The shell scripts: they parse, say what they would do, and pin what setup.py pins."""

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted((REPOSITORY / "scripts").rglob("*.sh"))
T5X = "t5x @ git+https://github.com/google-research/t5x@cc342d419ec3e3e9c4bf1df33c82330cafdc1e16"
TPU = {"TPU_NAME": "my-v4", "ZONE": "us-central2-b"}


@pytest.fixture
def dry_run(tmp_path):
    """``dry_run(script, *arguments)``: status, the commands it would run, what it says.

    In a copy, which has no environment that could be reused.
    """
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    shutil.copy(REPOSITORY / "setup.py", tmp_path)

    def run(script, *arguments, **variables):
        result = subprocess.run(
            ["bash", f"scripts/{script}", *arguments],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert not (tmp_path / ".venv").exists()
        commands = [shlex.split(line) for line in result.stdout.splitlines()]
        return result.returncode, commands, result.stderr

    return run


def requirements_of_setup() -> dict[str, list[Requirement]]:
    """Of the package ("") and of each extra."""
    tree = ast.parse((REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    ]
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    lists = {"": ast.literal_eval(values["install_requires"])}
    lists |= ast.literal_eval(values["extras_require"])
    return {extra: [Requirement(text) for text in texts] for extra, texts in lists.items()}


def constraints() -> dict[str, str]:
    text = (REPOSITORY / "scripts" / "constraints.txt").read_text(encoding="utf-8")
    return dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_says_what_it_is_for(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)
    text = path.read_text(encoding="utf-8")
    assert re.match(r"#!/usr/bin/env bash\n# \w", text)
    if path.parent.name in ("tpu", "gpu") or path.name == "fetch_checkpoints.sh":
        # Nobody shall think that it was tried where it was not.
        assert "# Tried: the dry run" in text and " Not tried:" in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_help_is_the_head_of_the_script(path, tmp_path):
    result = subprocess.run(
        ["bash", path, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert (result.returncode, result.stderr) == (0, "")
    head = re.match(r"#!.*\n((?:#.*\n)+)", path.read_text(encoding="utf-8"))[1]
    assert result.stdout == re.sub("^# ?", "", head, flags=re.MULTILINE)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck_finds_nothing():
    command = ["shellcheck", "--external-sources", *map(str, SCRIPTS)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_constraints_are_what_setup_allows():
    pins, seen = constraints(), set()
    # Others than this package's own extras.
    given = (r for texts in requirements_of_setup().values() for r in texts if r.name != "spec_t5x")
    for requirement in given:
        if requirement.name in pins:
            seen.add(requirement.name)
            assert pins[requirement.name] in requirement.specifier, requirement
    assert {r.name for r in requirements_of_setup()[""]} <= seen
    assert {r.name for r in requirements_of_setup()["t5x"]} <= {*seen, "spec_t5x"}


@pytest.mark.parametrize(("machine", "extra"), [("tpu", "tpu"), ("gpu", "gpu")])
def test_set_up_installs_pinned_versions(dry_run, machine, extra):
    status, commands, said = dry_run(f"{machine}/setup.sh", "--dry-run")
    assert status == 0
    installs = [command for command in commands if "install" in command]
    package, t5x = installs
    assert f".[{extra},t5x]" in package
    assert package[package.index("-c") + 1] == "scripts/constraints.txt"
    # JAX's version is the constraints'.
    assert {"jax", "jaxlib"} <= constraints().keys()
    (jax,) = [r for r in requirements_of_setup()[extra] if r.name == "jax"]
    assert jax.extras and not jax.specifier
    assert T5X in t5x and "--no-deps" in t5x
    # Most task modules import its library.
    assert any(word.startswith("t5==") for word in t5x)
    from_git = [word for word in t5x if " @ git+" in word]
    assert len(from_git) == 3
    assert all(re.search(r"@[0-9a-f]{40}$", word) for word in from_git)

    for flags in (("--dry-run", "--no-t5x"), ("--no-t5x", "--dry-run")):
        status, commands, _ = dry_run(f"{machine}/setup.sh", *flags)
        (package,) = [command for command in commands if "install" in command]
        assert (status, package[-1]) == (0, f".[{extra}]")
    status, commands, _ = dry_run(f"{machine}/setup.sh", "--here", "--dry-run", PYTHON="python3")
    package, t5x = [command for command in commands if "install" in command]
    # JAX and all else stay as they are, and no environment is made.
    assert status == 0 and "-c" not in package and package[-1] == ".[t5x]"
    assert {command[0] for command in commands} == {"python3"}
    status, commands, said = dry_run(f"{machine}/setup.sh", "--dry-run", "--no-tx5")
    assert (status, commands) == (2, [])
    assert "--no-tx5" in said


@pytest.fixture
def bare_machine(tmp_path):
    """``bare_machine(script, *arguments, uv, apt)``: the script where Python is too old.

    Its pip can install uv or cannot, and apt-get Python 3.11 or not. Commands are noted and do
    nothing but what the scripts look at.
    """
    programs, notes = tmp_path / "programs", tmp_path / "notes"
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "clone" / "scripts")
    shutil.copy(REPOSITORY / "setup.py", tmp_path / "clone")
    programs.mkdir()
    for name in ("bash", "cat", "chmod", "cksum", "cp", "dirname", "basename", "env", "mkdir"):
        (programs / name).symlink_to(shutil.which(name))

    def program(name, text):
        path = programs / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {notes}\n{text}\n')
        path.chmod(0o755)

    makes_env = f"mkdir -p .venv/bin; cp {programs}/new_python .venv/bin/python"
    program("id", "echo 0")
    program("new_python", f"case $* in '-m venv'*) {makes_env} ;; esac")

    def run(script, *arguments, uv, apt):
        notes.unlink(missing_ok=True)
        program("uv_itself", makes_env)
        has_uv = f"mkdir -p .uv/bin; cp {programs}/uv_itself .uv/bin/uv" if uv else "exit 1"
        program("python3", f"case $* in *ensurepip*) exit 1 ;; *pip*) {has_uv} ;; esac")
        brings = f"cp {programs}/new_python {programs}/python3.11"
        program("apt-get", f"case $* in *python3.11-venv) {brings} ;; esac" if apt else "exit 1")
        result = subprocess.run(
            ["bash", f"scripts/{script}", *arguments],
            cwd=tmp_path / "clone",
            env={"PATH": str(programs)},
            capture_output=True,
            text=True,
        )
        ran = notes.read_text().splitlines() if notes.exists() else []
        return result.returncode, [line for line in ran if "sys.version_info" not in line], result

    return run


def test_where_python_is_too_old_uv_fetches_one(bare_machine):
    status, ran, _ = bare_machine("tpu/setup.sh", uv=True, apt=True)
    assert status == 0
    assert ran[:2] == [
        "python3 -m pip install --quiet --target .uv uv",
        "uv_itself venv --quiet --seed --python 3.11 .venv",
    ]
    assert ran[2].startswith("new_python -m pip install")


def test_where_uv_is_not_to_be_had_apt_get_installs_one(bare_machine):
    status, ran, result = bare_machine("tpu/setup.sh", uv=False, apt=True)
    assert status == 0, result.stderr
    assert ran[2].startswith("apt-get update")
    assert ran[3].endswith("python3.11 python3.11-venv")
    assert ran[4] == "new_python -m venv .venv"


def test_where_neither_helps_that_is_said(bare_machine):
    status, ran, result = bare_machine("demo.sh", uv=False, apt=False)
    assert status == 2
    last = result.stderr.splitlines()[-1]
    assert last == "demo.sh: no Python 3.11 could be fetched: install one, and name it in PYTHON"


def test_a_dry_run_says_how_python_would_come(bare_machine):
    status, ran, result = bare_machine("tpu/setup.sh", "--dry-run", uv=True, apt=True)
    assert (status, ran) == (0, [])
    first, second, *_ = result.stdout.splitlines()
    assert first.strip() == "python3 -m pip install --quiet --target .uv uv"
    assert second.strip() == ".uv/bin/uv venv --quiet --seed --python 3.11 .venv"
    assert "fetching 3.11 with uv, else with apt-get" in result.stderr


def test_a_python_that_is_named_and_too_old_is_refused(dry_run):
    status, commands, said = dry_run("tpu/setup.sh", "--dry-run", PYTHON="no-such-python")
    assert (status, commands) == (2, [])
    assert "PYTHON is no-such-python, which is no Python 3.11 or later with venv" in said


@pytest.mark.parametrize("machine", ["tpu", "gpu"])
def test_launch_before_the_set_up_says_so(dry_run, machine):
    script = f"{machine}/launch.sh"
    status, commands, said = dry_run(script, "infer")
    assert (status, commands) == (2, [])
    assert f"there is no .venv: run bash scripts/{machine}/setup.sh first" in said
    status, commands, said = dry_run(script, "--dry-run", "infer")
    assert (status, len(commands)) == (0, 1)
    assert f"first: bash scripts/{machine}/setup.sh" in said


def test_docs_installs_what_it_needs_and_fails_on_warnings(dry_run):
    status, commands, _ = dry_run("docs.sh", "--dry-run", "--site-dir", "there")
    assert status == 0
    assert commands[-2][-1] == ".[docs]"
    # With --quiet, --strict would let warnings pass.
    build = [".venv/bin/python", "-m", "mkdocs", "build", "--strict"]
    assert commands[-1] == [*build, "--site-dir", "there"]


@pytest.mark.parametrize("machine", ["tpu", "gpu"])
def test_launch_takes_commands_and_t5xs_programs(dry_run, machine):
    script, binding = f"{machine}/launch.sh", "--gin.X='a b'"
    _, (ours,), _ = dry_run(script, "--dry-run", "infer", binding)
    assert ours == [".venv/bin/python", "-m", "spec_t5x.cli.main", "infer", binding]
    _, (theirs,), _ = dry_run(script, "--dry-run", "t5x.infer", binding)
    assert theirs == [".venv/bin/python", "-m", "t5x.infer", binding]
    status, commands, said = dry_run(script, "--dry-run")
    assert (status, commands) == (2, [])
    assert "nothing to launch" in said


def test_a_pod_runs_the_same_on_every_host(dry_run):
    script, binding = "tpu/launch_pod.sh", "--gin.X='a b'"
    status, (ssh,), _ = dry_run(script, "--dry-run", "infer", "--multiprocess", binding, **TPU)
    assert status == 0
    assert ssh[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-v4"]
    assert {"--zone=us-central2-b", "--worker=all"} <= set(ssh)
    remote = shlex.split(ssh[-1].removeprefix("--command="))
    expected = ["bash", "scripts/tpu/launch.sh", "infer", "--multiprocess", binding]
    assert remote == ["cd", "spec_t5x", "&&", *expected]

    _, (archive, copy, ssh), _ = dry_run(script, "--dry-run", "setup", **TPU, PROJECT="p")
    assert archive[:2] == ["git", "archive"]
    assert copy[4] == "scp" and copy[-3:] == [*ssh[6:8], "--worker=all"]
    assert "--project=p" in copy
    assert ssh[-1].endswith("bash spec_t5x/scripts/tpu/setup.sh")

    status, commands, said = dry_run(script, "--dry-run", "setup", TPU_NAME="x", ZONE="")
    assert (status, commands) == (2, [])
    assert "TPU_NAME is 'x' and ZONE '': set both" in said


def test_checkpoints_are_fetched_from_where_they_lie(dry_run):
    script = "fetch_checkpoints.sh"
    names = ("t5_1_1_xxl", "t5_1_0_base", "flan_t5_small", "mt5_xl", "byt5_large")
    status, commands, _ = dry_run(script, "--dry-run", "--to", "there", *names)
    assert status == 0
    copies = {c[-2].removeprefix("gs://t5-data/"): c[-1] for c in commands if c[0] == "gcloud"}
    models = "pretrained_models/t5x"
    assert copies == {
        f"{models}/t5_1_1_xxl/checkpoint_1000000": "there/t5_1_1_xxl/",
        f"{models}/t5_base/checkpoint_999900": "there/t5_1_0_base/",
        f"{models}/flan_t5_small/checkpoint_1198000": "there/flan_t5_small/",
        f"{models}/mt5_xl/checkpoint_1000000": "there/mt5_xl/",
        f"{models}/byt5_large/checkpoint_1000000": "there/byt5_large/",
        "vocabs/cc_all.32000.100extra": "there/vocabularies/",
        "vocabs/mc4.250000.100extra": "there/vocabularies/",
    }
    status, names, _ = dry_run(script, "--list")
    assert (status, len(names)) == (0, 30)
    status, _, said = dry_run(script, "--dry-run", "t5_1_1_xxxl")
    assert (status, "no checkpoint 't5_1_1_xxxl'" in said) == (2, True)


@pytest.fixture
def train_pairs(tmp_path):
    """``train_pairs(*arguments)``: the script, with a command that only notes its arguments.

    The training of the stage in ``UNFINISHED`` is out of time.
    """
    for folder in ("ende", "summarize"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    command = tmp_path / "spec-t5x"
    command.write_text(
        """#!/usr/bin/env bash
echo "$@" >> "$NOTES"
for word in "$@"; do
  case $word in --gin.OUTPUT_DIR=*) folder=$(eval echo "${word#*=}") ;; esac
done
if [ -n "${folder:-}" ]; then
  [ "${folder##*/}" != "${UNFINISHED:-}" ] || exit 75
fi
if [ -n "${SLEEPING:-}" ]; then
  trap 'echo terminated >> "$NOTES"; exit 1' TERM
  echo sleeping >> "$NOTES"
  while :; do sleep 0.05; done
fi
"""
    )
    command.chmod(0o755)

    notes = tmp_path / "notes"

    def started(*arguments, output="output", **variables):
        notes.unlink(missing_ok=True)
        places = ("--data", tmp_path / "data", "--output", tmp_path / output)
        return subprocess.Popen(
            ["bash", str(REPOSITORY / "scripts" / "train_pairs.sh"), *map(str, places), *arguments],
            env={**os.environ, "SPEC_T5X": str(command), "NOTES": str(notes), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(*arguments, **options):
        script = started(*arguments, **options)
        _, said = script.communicate()
        ran = notes.read_text().splitlines() if notes.exists() else []
        return script.returncode, ran, said

    run.started = started
    return run


def test_every_stage_is_gone_through_once(train_pairs, tmp_path):
    status, ran, said = train_pairs()
    assert status == 0, said
    kinds = [line.split()[0] for line in ran]
    assert kinds == [
        *("train", "train", "train-ngram", "distill", "distill", "distill"),
        *("train", "train", "distill", "distill", "train-ngram", "distill"),
    ]
    for line in ran:
        for file in re.findall(r"--gin_file=(\S+)", line):
            assert (REPOSITORY / file).is_file()
    # What one stage makes is what the next asks for.
    assert f"--gin.CHECKPOINT_PATH='{tmp_path}/output/target/model'" in ran[1]
    assert f"--gin.CHECKPOINT_PATH='{tmp_path}/output/target_more/model'" in ran[4]
    assert f"--gin.INITIAL_DRAFT='{tmp_path}/output/draft/draft'" in ran[4]
    assert f"--gin.CHECKPOINT_PATH='{tmp_path}/output/target_more/model'" in ran[5]
    assert f"--gin.DATA_DIR='{tmp_path}/data/summarize'" in ran[6]
    teacher = f"{tmp_path}/output/summaries_target_more/model"
    assert f"--gin.CHECKPOINT_PATH='{teacher}'" in ran[-1]
    status, ran, said = train_pairs()
    assert (status, ran) == (0, [])
    assert "stage eagle is done" in said


def test_a_training_that_is_out_of_time_is_resumed(train_pairs):
    arguments = ("target", "target_more", "--", "--gin.X=1")
    status, ran, said = train_pairs(*arguments, UNFINISHED="target_more")
    assert status == 75, said
    assert len(ran) == 2 and ran[0].endswith("--gin.X=1")
    status, (line,), said = train_pairs(*arguments)
    assert status == 0, said
    assert "train_ende_target_more.gin" in line


def test_a_signal_to_the_script_ends_the_training(train_pairs, tmp_path):
    script = train_pairs.started("target", SLEEPING="1")
    notes = tmp_path / "notes"
    while not (notes.exists() and "sleeping" in notes.read_text()):
        assert script.poll() is None, script.communicate()
        time.sleep(0.01)
    script.terminate()
    script.communicate()
    assert script.returncode == 128 + signal.SIGTERM
    assert notes.read_text().splitlines()[-1] == "terminated"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--date", "x"), "unknown argument '--date'"),
        (("tarjet",), "no stage 'tarjet': choose of target"),
        (("--data", "/nowhere"), "no folder /nowhere/ende"),
    ],
)
def test_mistakes_of_the_recipe(train_pairs, arguments, message):
    status, ran, said = train_pairs(*arguments)
    assert (status, ran) == (2, [])
    assert message in said
