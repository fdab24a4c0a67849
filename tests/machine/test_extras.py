"""Packages of extras that are not installed, or do not go together."""

import logging
import subprocess
import sys

import pytest

from spec_t5x.checkpoints.huggingface import weight_files
from spec_t5x.cli.main import main
from spec_t5x.errors import InputError
from spec_t5x.machine.extras import EXTRAS, needed
from tests.child import printed

# Modules that extras bring, and others that come with them.
BROUGHT = {name.partition(".")[0] for name in EXTRAS} | {"orbax", "tensorflow"}


@pytest.fixture
def without(monkeypatch):
    """Provides a function that makes the import of packages fail as if they were absent."""

    def remove(*names):
        for name in (*sys.modules, *names):
            root = name.partition(".")[0]
            if root in names:
                monkeypatch.setitem(sys.modules, name, None)

    return remove


@pytest.mark.parametrize("module", EXTRAS)
def test_what_is_absent_is_named_with_its_extra(without, module):
    without(module)
    extra = EXTRAS[module]
    # The absent package may be one that the module imports.
    for absent in (module, "no_such_part"):
        with pytest.raises(InputError) as caught, needed(module):
            __import__(absent)
        remedy = f"pip install 'spec_t5x[{extra.name}]'"
        assert str(caught.value) == f"{extra.purpose}: {absent} is not installed: {remedy}"


PROTOBUF = (
    "Detected incompatible Protobuf Gencode/Runtime versions when loading a/b.proto: gencode "
    "6.31.1 runtime 5.29.6. Runtime version cannot be older."
)


@pytest.mark.parametrize(
    ("raised", "logged", "message"),
    [
        # TFDS logs the error and continues half imported.
        (
            AttributeError("module has no attribute 'core'"),
            PROTOBUF,
            r"seqio cannot be imported \(what it imports takes protobuf 6.31.1, and 5.29.6 is "
            r"installed\): pip install 'protobuf>=6.31.1,<7', and restart Python$",
        ),
        (RuntimeError(PROTOBUF), None, "pip install 'protobuf>=6.31.1,<7'"),
        (
            ImportError("cannot import name 'x'\nfrom 'y'"),
            None,
            r"\(cannot import name 'x' from 'y'\): pip install 'spec_t5x\[tasks\]' --upgrade",
        ),
    ],
)
def test_versions_that_do_not_go_together_are_one_line(raised, logged, message, caplog):
    def import_it():
        with needed("seqio"):
            if logged:
                logging.getLogger("absl").error(logged)
            raise raised

    with pytest.raises(InputError, match=message) as caught:
        import_it()
    assert "\n" not in str(caught.value)
    assert caplog.records == []
    # Afterwards absl's errors are shown again.
    logging.getLogger("absl").error("more")
    assert [record.getMessage() for record in caplog.records] == ["more"]


@pytest.mark.parametrize(
    ("words", "absent", "message"),
    [
        ("evaluate --mixture_or_task x", "seqio", "seqio tasks: seqio is not installed"),
        ("infer --mixture_or_task x --output_dir o", "seqio", "pip install 'spec_t5x[tasks]'"),
        ("evaluate --data pairs.tsv", "sacrebleu", "BLEU: sacrebleu is not installed"),
        ("evaluate --data pairs.tsv --metric rouge", "rouge_score", "pip install 'spec_t5x[eval]'"),
        ("reproduce figure2 --output o", "matplotlib", "pip install 'spec_t5x[plots]'"),
        ("reproduce figure2 --output o", "jinja2", "reproduce: jinja2 is not installed"),
        (
            "train --gin_file=gin_configs/runs/first_training.gin",
            "optax",
            "training: optax is not installed: pip install 'spec_t5x[train]'",
        ),
        ("demo", "gradio", "demo: gradio is not installed: pip install 'spec_t5x[demo]'"),
    ],
)
def test_a_command_says_which_extra_it_needs(
    tiny_pair, without, monkeypatch, tmp_path, capsys, words, absent, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    # These modules have imported it already.
    for name in list(sys.modules):
        if name.startswith(("spec_t5x.data.t", "spec_t5x.data.p", "spec_t5x.inference.task")):
            monkeypatch.delitem(sys.modules, name)
        if name.startswith(("spec_t5x.labs.reproduction", "spec_t5x.labs.training.")):
            monkeypatch.delitem(sys.modules, name)
    without(absent)
    models = ("--target", str(tiny_pair / "target"), "--draft", "copy")
    command, *rest = words.split()
    needs_models = command in ("evaluate", "infer", "demo")
    assert main([command, *rest, *(models if needs_models else ())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_records_of_absl_name_the_module_that_they_are_of():
    """Warnings of Orbax stay hidden, as a training needs."""
    program = (
        "import logging\n"
        "from spec_t5x.machine.extras import needed\n"
        "with needed('optax'):\n"
        "    pass\n"
        "logging.basicConfig(format='%(pathname)s')\n"
        "from absl import logging\n"
        "logging.use_python_logging()\n"
        "logging.warning('')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "<string>\n"


def test_weights_of_pytorch_name_their_extra(without):
    without("torch")
    with pytest.raises(InputError, match=r"pip install 'spec_t5x\[hf\]', or convert it"):
        weight_files.check_torch("pytorch_model.bin")


def test_a_generator_needs_no_extra(tiny_pair):
    program = (
        "import sys\n"
        f"for name in {sorted(BROUGHT)}:\n"
        "    sys.modules[name] = None\n"
        "from spec_t5x.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    models = ("--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft"))
    words = ("generate", *models, "--gamma", "2", "--max_decode_len", "4", "--compare", "A cat.")
    assert "identical" in printed("-c", program, *words)
