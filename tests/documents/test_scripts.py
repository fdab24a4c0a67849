"""The shell scripts: they parse, print what they would do, and pin what setup.py allows."""

import ast
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.child import REPOSITORY, finished, printed

SCRIPTS = sorted((REPOSITORY / "scripts").rglob("*.sh"))
T5X = "t5x @ git+https://github.com/google-research/t5x@cc342d419ec3e3e9c4bf1df33c82330cafdc1e16"
TPU = {"TPU_NAME": "my-v4", "ZONE": "us-central2-b"}
each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


@pytest.fixture
def clone(tmp_path):
    """Provides a copy of the scripts, which has no environment that could be reused."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "clone" / "scripts")
    shutil.copy(REPOSITORY / "setup.py", tmp_path / "clone")
    return tmp_path / "clone"


@pytest.fixture
def dry_run(clone):
    """Provides ``dry_run(script, *arguments)``: status, the commands it would run, its errors."""

    def run(script, *arguments, **variables):
        result = finished("bash", f"scripts/{script}", *arguments, cwd=clone, **variables)
        assert not (clone / ".venv").exists()
        commands = [shlex.split(line) for line in result.stdout.splitlines()]
        return result.returncode, commands, result.stderr

    return run


def requirements_of_setup() -> dict[str, list[Requirement]]:
    """Returns the requirements of the package ("") and of each extra."""
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


@each_script
def test_a_script_parses_and_its_help_is_its_head(path, tmp_path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)
    head = re.match(r"#!/usr/bin/env bash\n((?:#.*\n)+)", path.read_text(encoding="utf-8"))[1]
    if path.parent.name in ("tpu", "gpu") or path.name == "fetch_checkpoints.sh":
        # A reader must not think that it was tried where it was not.
        assert "# Tested: the dry run" in head and " Not tested:" in head
    result = finished("bash", path, "--help", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == re.sub("^# ?", "", head, flags=re.MULTILINE)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck_finds_nothing():
    result = finished("shellcheck", "--external-sources", *SCRIPTS)
    assert (result.returncode, result.stdout) == (0, "")


def test_constraints_are_what_setup_allows():
    pins, seen = constraints(), set()
    # Requirements other than this package's own extras.
    given = (r for texts in requirements_of_setup().values() for r in texts if r.name != "spec_t5x")
    for requirement in given:
        if requirement.name in pins:
            seen.add(requirement.name)
            assert pins[requirement.name] in requirement.specifier, requirement
    assert {r.name for r in requirements_of_setup()[""]} <= seen
    assert {r.name for r in requirements_of_setup()["t5x"]} <= {*seen, "spec_t5x"}


@pytest.mark.parametrize("machine", ["tpu", "gpu"])
def test_set_up_installs_pinned_versions(dry_run, machine):
    def installs(*flags, **variables):
        status, commands, _ = dry_run(f"{machine}/setup.sh", "--dry-run", *flags, **variables)
        assert status == 0
        return commands, [command for command in commands if "install" in command]

    _, (package, t5x) = installs()
    assert f".[{machine},t5x]" in package
    assert package[package.index("-c") + 1] == "scripts/constraints.txt"
    # The constraints pin JAX.
    assert {"jax", "jaxlib"} <= constraints().keys()
    (jax,) = [r for r in requirements_of_setup()[machine] if r.name == "jax"]
    assert jax.extras and not jax.specifier
    assert T5X in t5x and "--no-deps" in t5x
    # Most task modules import its library.
    assert any(word.startswith("t5==") for word in t5x)
    from_git = [word for word in t5x if " @ git+" in word]
    assert len(from_git) == 3
    assert all(re.search(r"@[0-9a-f]{40}$", word) for word in from_git)

    _, (package,) = installs("--no-t5x")
    assert package[-1] == f".[{machine}]"
    commands, (package, t5x) = installs("--here", PYTHON="python3")
    # No environment is made.
    assert "-c" not in package and ".[t5x]" in package
    assert {command[0] for command in commands} == {"python3"}


def test_into_pythons_environment_nothing_replaces_its_jax(dry_run, tmp_path):
    jax = ["jax==0.7.2", "jax-cuda12-pjrt==0.7.2", "jax-cuda12-plugin==0.7.2", "jaxlib==0.7.2"]
    jax.append("libtpu==0.0.20")
    lines = "\n".join(["flax==0.11.2", *jax, "jaxtyping==0.3.3"])
    python = tmp_path / "python"
    python.write_text(f"#!/usr/bin/env bash\ncat <<END\n{lines}\nEND\n")
    python.chmod(0o755)
    flags = ("--dry-run", "--no-t5x", "--here")
    status, (package, _), _ = dry_run("tpu/setup.sh", *flags, PYTHON=str(python))
    assert status == 0
    assert package[-6:] == [".", *jax]


def test_pythons_path_may_have_a_space(dry_run, tmp_path):
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    status, commands, _ = dry_run("tpu/setup.sh", "--dry-run", PYTHON=str(python))
    assert status == 0 and commands[0] == [str(python), "-m", "venv", ".venv"]


@pytest.mark.parametrize("uv", [True, False])
def test_if_python_is_too_old_uv_fetches_one(clone, tmp_path, uv):
    """Programs are noted and do nothing but what the scripts look at; pip can install uv or not."""
    programs, notes = tmp_path / "programs", tmp_path / "notes"
    programs.mkdir()
    for name in ("bash", "cat", "chmod", "cksum", "cp", "dirname", "basename", "env", "mkdir"):
        (programs / name).symlink_to(shutil.which(name))
    makes_env = f'mkdir -p .venv/bin; cp "{programs}/new_python" .venv/bin/python'
    has_uv = f'mkdir -p .uv/bin; cp "{programs}/uv_itself" .uv/bin/uv' if uv else "exit 1"
    for name, text in {
        "new_python": "",
        "uv_itself": makes_env,
        "python3": f"case $* in *ensurepip*) exit 1 ;; *pip*) {has_uv} ;; esac",
    }.items():
        path = programs / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "{notes}"\n{text}\n')
        path.chmod(0o755)

    def run(*flags):
        return finished("bash", "scripts/tpu/setup.sh", *flags, cwd=clone, PATH=str(programs))

    install = "python3 -m pip install --quiet --target .uv uv"
    create = "uv_itself venv --quiet --seed --python 3.11 .venv"
    dry = [line.strip() for line in run("--dry-run").stdout.splitlines()]
    assert dry[:2] == [install, create.replace("uv_itself", ".uv/bin/uv")]
    result = run()
    ran = [line for line in notes.read_text().splitlines() if "sys.version_info" not in line]
    if uv:
        assert result.returncode == 0, result.stderr
        assert ran[:2] == [install, create] and ran[2].startswith("new_python -m pip install")
    else:
        last = "setup.sh: Python 3.11 could not be downloaded: install it and set PYTHON"
        assert (result.returncode, result.stderr.splitlines()[-1]) == (2, last)


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "message"),
    [
        ("tpu/setup.sh", ["--dry-run", "--no-tx5"], {}, "--no-tx5"),
        (
            "tpu/setup.sh",
            ["--dry-run"],
            {"PYTHON": "no-such-python"},
            "PYTHON is no-such-python, which is no Python 3.11 or later with venv",
        ),
        ("tpu/launch.sh", ["infer"], {}, "there is no .venv: run bash scripts/tpu/setup.sh first"),
        ("gpu/launch.sh", ["--dry-run"], {}, "nothing to launch"),
        (
            "tpu/launch_pod.sh",
            ["--dry-run", "setup"],
            {"TPU_NAME": "x", "ZONE": ""},
            "TPU_NAME is 'x' and ZONE '': set both",
        ),
        ("fetch_checkpoints.sh", ["--dry-run", "t5_9"], {}, "no checkpoint 't5_9'"),
        ("fetch_checkpoints.sh", ["--dry-run", "t5_1_1_.*"], {}, "no checkpoint 't5_1_1_.*'"),
        ("tpu/reproduce.sh", ["--dry-run"], {}, "no output: give a folder for the report"),
        ("tpu/reproduce.sh", ["out", "--quick"], {}, "unknown argument '--quick': see --help"),
        (
            "tpu/reproduce.sh",
            ["out", "t5_1_1_xl"],
            {},
            "no public T5 1.0 't5_1_1_xl': give t5_1_0_S",
        ),
        ("gpu/train_t5.sh", ["--dry-run", "x"], {}, "1 arguments: give DATA and OUTPUT"),
        ("gpu/train_t5.sh", ["--gin.A=1", "x", "y"], {}, "unknown argument '--gin.A=1': see --h"),
        ("fetch_checkpoints.sh", ["--to"], {}, "--to is '': give a folder after it"),
        ("fetch_checkpoints.sh", ["--to", "--list"], {}, "--to is '--list': give a folder"),
        ("matrix.sh", ["--dry-run", "--to", ""], {}, "--to is '': give a value after it"),
        ("tpu/reproduce.sh", ["out", "--to"], {}, "--to is '': give a folder after it"),
        ("tpu/launch.sh", ["--here", "infer"], {"PYTHON": "false"}, "lacks what spec_t5x requ"),
    ],
)
def test_mistakes_are_named_before_anything_runs(dry_run, script, arguments, variables, message):
    status, commands, error = dry_run(script, *arguments, **variables)
    assert (status, commands) == (2, [])
    assert message in error


def test_without_a_gpu_nothing_is_launched():
    given = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "scripts/gpu/launch.sh", "--here", "--version"]
    launch = functools.partial(finished, *command, **given)
    refused = launch(JAX_PLATFORMS="")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no accelerator: jax.devices() is [CpuDevice(id=0)]" in refused.stderr
    asked_for = launch(JAX_PLATFORMS="cpu")
    assert asked_for.returncode == 0 and asked_for.stdout.startswith("spec-t5x ")


def test_the_gpu_training_mixes_the_tasks_and_trains_the_drafts_last(dry_run):
    status, commands, _ = dry_run("gpu/train_t5.sh", "--dry-run", "/data", "/out", "--gin.A=1")
    assert status == 0
    *mixing, target, first, second = commands
    assert [each[3] for each in mixing] == [
        f"/out/{folder}/{name}.tsv.gz"
        for folder, name in [
            ("mixture", "train"),
            ("once", "train"),
            ("mixture", "dev"),
            ("once", "dev"),
        ]
    ]
    assert target[3:5] == ["train", "--gin_file=gin_configs/runs/train_t5_target.gin"]
    # They run at the same time.
    stages = {each[4].removesuffix(".gin").rpartition("_")[2] for each in (first, second)}
    assert stages == {"draft", "eagle"}
    assert all(each[-1] == "--gin.A=1" for each in (target, first, second))


def test_the_gpu_training_grows_the_target_alone(dry_run):
    flags = ("--grow", "/small", "--dry-run", "/data", "/out", "--gin.A=1")
    status, commands, _ = dry_run("gpu/train_t5.sh", *flags)
    assert status == 0
    growing = ["--gin.train.initial_checkpoint='/small'", "--gin.train.grow=True"]
    assert [set(growing) <= set(each) for each in commands[-3:]] == [True, False, False]
    assert commands[-3][-3:] == [*growing, "--gin.A=1"]


def test_docs_installs_what_it_needs_and_fails_on_warnings(dry_run):
    status, commands, _ = dry_run("docs.sh", "--dry-run", "--site-dir", "there")
    assert status == 0
    assert commands[-2][-1] == ".[docs]"
    # With --quiet, --strict would let warnings pass.
    build = [".venv/bin/python", "-m", "mkdocs", "build", "--strict"]
    assert commands[-1] == [*build, "--site-dir", "there"]
    _, commands, _ = dry_run("docs.sh", "--here", "--dry-run", PYTHON="python3")
    assert {command[0] for command in commands} == {"python3"}


@pytest.mark.parametrize("machine", ["tpu", "gpu"])
def test_launch_takes_commands_and_t5xs_programs(dry_run, machine):
    script, binding = f"{machine}/launch.sh", "--gin.X='a b'"
    _, (ours,), notes = dry_run(script, "--dry-run", "infer", binding)
    assert ours == [".venv/bin/python", "-m", "spec_t5x.cli.main", "infer", binding]
    assert f"first: bash scripts/{machine}/setup.sh" in notes
    _, (theirs,), _ = dry_run(script, "--dry-run", "t5x.infer", binding)
    assert theirs == [".venv/bin/python", "-m", "t5x.infer", binding]


def test_a_pod_runs_the_same_on_every_host(dry_run):
    script, binding = "tpu/launch_pod.sh", "--gin.X='a b'"
    status, (ssh,), _ = dry_run(script, "--dry-run", "infer", "--multiprocess", binding, **TPU)
    assert status == 0
    assert ssh[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-v4"]
    assert {"--zone=us-central2-b", "--worker=all"} <= set(ssh)
    remote = shlex.split(ssh[-1].removeprefix("--command="))
    expected = ["bash", "scripts/tpu/launch.sh", "infer", "--multiprocess", binding]
    assert remote == ["cd", "spec_t5x", "&&", "SEVERAL_HOSTS=1", *expected]

    _, (archive, copy, ssh), _ = dry_run(script, "--dry-run", "setup", **TPU, PROJECT="p")
    assert archive[:2] == ["git", "archive"]
    assert copy[4] == "scp" and copy[-3:] == [*ssh[6:8], "--worker=all"]
    assert "--project=p" in copy
    # Modules of contrib that are gone would be registered.
    clean, unpack, set_up = ssh[-1].removeprefix("--command=").split(" && ")
    assert clean == "rm -rf spec_t5x/spec_t5x spec_t5x/gin_configs"
    assert unpack == "tar xzf spec_t5x.tar.gz" and set_up == "bash spec_t5x/scripts/tpu/setup.sh"

    # Flags of the hosts' scripts reach them.
    _, (*_, ssh), _ = dry_run(script, "--dry-run", "--here", "setup", "--no-t5x", **TPU)
    assert ssh[-1].endswith(" && bash spec_t5x/scripts/tpu/setup.sh --here --no-t5x")
    _, (ssh,), _ = dry_run(script, "--here", "--dry-run", "infer", **TPU)
    assert ssh[-1].endswith(" bash scripts/tpu/launch.sh --here infer")


def test_on_a_pod_t5xs_programs_run_connected(dry_run, tmp_path):
    flags = ("--dry-run", "t5x.infer", "--gin.X='a b'")
    _, (command,), _ = dry_run("tpu/launch.sh", *flags, SEVERAL_HOSTS="1")
    assert command[:2] == [".venv/bin/python", "-c"] and command[3:] == list(flags[1:])
    (tmp_path / "jax.py").write_text("class distributed:\n    initialize = lambda: print('on')")
    (tmp_path / "t5x").mkdir()
    # gin files of T5X import __main__.
    (tmp_path / "t5x" / "infer.py").write_text(
        "import __main__, sys\nname = 3\nprint(__name__, __main__.name, sys.argv[1:])\n"
    )
    assert printed(*command[1:], cwd=tmp_path) == f"on\n__main__ 3 {command[4:]}\n"


def test_checkpoints_are_fetched_from_where_they_are(dry_run):
    script = "fetch_checkpoints.sh"
    names = ("t5_1_1_xxl", "t5_1_0_base", "flan_t5_small", "mt5_xl", "byt5_large")
    status, commands, _ = dry_run(script, "--dry-run", "--to", "there", *names)
    assert status == 0
    copies = {c[-2].removeprefix("gs://t5-data/"): c[-1] for c in commands if "gcloud" in c}
    # Public files need no account, which gcloud must be told.
    assert "CLOUDSDK_AUTH_DISABLE_CREDENTIALS=true" in commands[-1]
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


def test_public_checkpoints_need_no_account(clone, tmp_path):
    gcloud = tmp_path / "gcloud"
    gcloud.write_text('#!/usr/bin/env bash\necho "$CLOUDSDK_AUTH_DISABLE_CREDENTIALS $3 $4"\n')
    gcloud.chmod(0o755)
    command = "bash", "scripts/fetch_checkpoints.sh", "--to", "a folder", "byt5_small"
    result = finished(*command, cwd=clone, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "true --no-clobber --recursive\n"
    assert (clone / "a folder" / "byt5_small").is_dir()


def test_the_public_weights_are_set_up_fetched_and_measured(dry_run):
    places = ("--dry-run", "--no-t5x", "--to", "there", "a folder")
    status, commands, _ = dry_run(
        "tpu/reproduce.sh", *places, "t5_1_0_xl", "t5_1_0_small", "--", "--quick"
    )
    assert status == 0
    assert [c[-1] for c in commands if "gcloud" in c][::2] == [
        "there/t5_1_0_xl/",
        "there/t5_1_0_small/",
    ]
    installed = [command[-1] for command in commands if "install" in command]
    assert installed == [".[tpu]", ".[tasks,eval,plots]"]
    command = commands[-1]
    assert command[1:] == [
        *("-m", "spec_t5x.cli.main", "reproduce", "public", "--output", "a folder"),
        *("--models", "there", "--quick"),
    ]
    _, commands, _ = dry_run("tpu/reproduce.sh", "--dry-run", "out")
    # The models are the Hub's.
    assert commands[-1][-2:] == ["--output", "out"]
    assert not any("gcloud" in command for command in commands)
    assert any(T5X in command for command in commands)
