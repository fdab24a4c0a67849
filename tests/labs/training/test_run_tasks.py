"""``spec-t5x train`` and ``distill`` on seqio tasks and mixtures."""

import json

import jax
import numpy as np
import pytest
import sacrebleu

from spec_t5x.checkpoints.loading import load, load_vocabulary
from spec_t5x.cli.main import main
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.labs.metrics import METRICS
from spec_t5x.labs.training import text_metrics
from spec_t5x.labs.training.exports import save_model
from spec_t5x.labs.training.run_data import DataOptions
from tests.conftest import ENGLISH, GERMAN
from tests.labs.training.toys import a_minute_a_step, assert_identical, run_command
from tests.toy_t5 import tiny_t5

seqio = pytest.importorskip("seqio")
import tensorflow as tf  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

MIXTURE = "run_tasks_mixture"
# For each task: its texts, its rate and its metric.
TASKS = {
    "run_tasks_ende": (ENGLISH, GERMAN, 2.0, "bleu"),
    "run_tasks_copy": ([t[:12] for t in ENGLISH], [t[:9] for t in ENGLISH], 1.0, "rouge"),
}
BINDINGS = {
    "MIXTURE_OR_TASK_NAME": MIXTURE,
    "TASK_FEATURE_LENGTHS": {"inputs": 16, "targets": 12},
    "TRAIN_STEPS": 6,
    "DEV_EXAMPLES": 5,
    "TaskDataOptions.buckets": (16,),
    "TaskDataOptions.tokens_per_batch": 64,
    "OptimizerOptions.warmup_steps": 1,
    "OptimizerOptions.cooldown_steps": 0,
    "TrainOptions.eval_period": 3,
    "TrainOptions.checkpoint_period": 2,
}


@pytest.fixture(scope="module", autouse=True)
def tasks():
    # An absent vocabulary: the model's takes its place.
    feature = seqio.Feature(seqio.SentencePieceVocabulary("absent.model"), add_eos=True)
    for name, (sources, targets, _, metric) in TASKS.items():
        texts = {"inputs": list(sources), "targets": list(targets)}

        def dataset(split, shuffle_files, seed=None, texts=texts):
            return tf.data.Dataset.from_tensor_slices(texts)

        seqio.TaskRegistry.add(
            name,
            seqio.FunctionDataSource(dataset, splits=("train", "validation")),
            preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
            output_features={"inputs": feature, "targets": feature},
            metric_fns=[METRICS[metric]],
        )
    seqio.MixtureRegistry.add(MIXTURE, [(name, each[2]) for name, each in TASKS.items()])
    yield
    seqio.MixtureRegistry.remove(MIXTURE)
    for name in TASKS:
        seqio.TaskRegistry.remove(name)


@pytest.fixture
def train(tiny_pair):
    """Provides ``train(output, **bindings)``, which starts from the draft of the pair."""
    start = tiny_pair / "draft"
    sizes = load(start, dtype="float32").config.to_dict() | {"dropout_rate": 0.1}
    given = BINDINGS | {f"T5Config.{name}": value for name, value in sizes.items()}
    given |= {"INITIAL_CHECKPOINT": str(start), "METRICS_EXAMPLES": 4}
    given["train.export_dtype"] = "float32"

    def run(output, **bindings):
        return run_command("train", "train_task", **given | {"OUTPUT_DIR": str(output)} | bindings)

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_mixture_cut_and_resumed_ends_where_an_undisturbed_run_does(train, tmp_path, capfd):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(whole) == 0
    # Scores do not change the training.
    unscored = {"train.metrics": None}
    with a_minute_a_step():
        assert train(cut, **unscored, **{"TrainOptions.max_minutes": 3.5}) == 75
    assert train(cut, **unscored) == 0
    assert "resumed at step 3" in capfd.readouterr().err
    expected, found = (load(each / "model", dtype="float32").params for each in (whole, cut))
    assert_identical(found, expected)
    lines = lines_of(whole / "metrics.jsonl")
    (dev, *_), (again, *_) = (
        [line for line in of_run if line.get("step") == 6 and "dev_loss" in line]
        for of_run in (lines, lines_of(cut / "metrics.jsonl"))
    )
    assert dev == again

    # Scored at the end, each task by its metric.
    (scored,) = [line for line in lines if "metrics" in line]
    assert scored["step"] == 6
    figures = scored["metrics"]
    assert set(figures["run_tasks_ende"]) == {"bleu"}
    assert set(figures["run_tasks_copy"]) == {"rouge1", "rouge2", "rougeLsum"}
    assert load(whole / "model").metadata["metrics"] == figures
    written = lines_of(whole / "predictions" / "run_tasks_ende-000006.jsonl")
    assert [line["input"]["inputs_pretokenized"] for line in written] == ENGLISH[:4]
    bleu = sacrebleu.corpus_bleu([each["prediction"] for each in written], [GERMAN[:4]])
    assert figures["run_tasks_ende"]["bleu"] == pytest.approx(bleu.score)

    # ``evaluate`` computes the same figures for the exported model.
    capfd.readouterr()
    words = ["--mixture_or_task", MIXTURE, "--limit", "4", "--target", str(whole / "model")]
    lengths = "--gin.TextSource.task_feature_lengths={'inputs': 16, 'targets': 12}"
    assert main(["evaluate", *words, "--gamma", "0", "--draft", "none", lengths]) == 0
    printed = capfd.readouterr().out.replace("}\n{", "}\0{").split("\0")
    for report in map(json.loads, printed):
        for name, value in figures[report["task"]].items():
            assert report[name] == pytest.approx(value, abs=1e-9)


def test_a_file_is_scored_with_its_metric(tiny_pair, tmp_path):
    pairs = [(s[:20].strip(), t[:20].strip()) for s, t in zip(ENGLISH, GERMAN, strict=True)]
    text = "".join(f"{source}\t{target}\n" for source, target in pairs)
    # A line without a source is skipped.
    (tmp_path / "dev.tsv").write_text("\tno source\n" + text)
    files = {"directory": str(tmp_path), "train_file": "train.tsv", "dev_file": "dev.tsv"}
    data = DataOptions(**files, metric="rouge", source_prefix="We see ", max_source_length=9)
    vocabulary = load_vocabulary(str(tiny_pair / "target"))
    (scored,) = data.scored(vocabulary, 3)
    assert scored.name == "dev"
    assert scored.pairs == [(f"We see {source}", target) for source, target in pairs[:3]]
    assert scored.ids == [[*vocabulary.encode(source)[:8], 1] for source, _ in scored.pairs]
    targets = [target for _, target in scored.pairs]
    figures = scored.metric(targets, targets)
    assert figures == dict.fromkeys(("rouge1", "rouge2", "rougeLsum"), 100.0)


def test_texts_are_scored_with_the_weights_that_an_export_stores(tmp_path):
    model = tiny_t5(0, vocab_size=384)
    for stored in ("int8", "bfloat16"):
        save_model(tmp_path / stored, model.params, model.config, ByteVocabulary(), dtype=stored)
        expected = load(tmp_path / stored).params
        found = text_metrics.rounded_params(model.params, stored=stored, computed="float32")
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_distill_on_a_mixture(tiny_pair, tmp_path, capfd):
    given = {
        "OUTPUT_DIR": str(tmp_path),
        "CHECKPOINT_PATH": str(tiny_pair / "target"),
        "TRAIN_TEXTS": 12,
        # The export is the start: only the texts matter here.
        "TrainOptions.max_minutes": 1e-9,
        "DistillOptions.eval_temperatures": (0.0,),
        "DistillOptions.dev_texts": 4,
    }
    assert run_command("distill", "distill_task", **BINDINGS | given) == 75
    error = capfd.readouterr().err
    assert f"{MIXTURE} (train): the target has written 12 of 12 texts" in error
    assert f"{MIXTURE} (validation): the target has written 4 of 4 texts" in error
    assert (tmp_path / "draft" / "config.json").is_file()


NO_START = {"INITIAL_CHECKPOINT": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MIXTURE_OR_TASK_NAME": "run_tasks_edne"}, "no task or mixture 'run_tasks_edne'"),
        ({"DEV_SPLIT": "test"}, "has no split 'test': give one of train, validation"),
        ({"DEV_SPLIT": None}, "train.metrics score held-out texts and there are none"),
        ({"TASK_FEATURE_LENGTHS": {"inputs": 16}}, "give tokens of both sides"),
        (NO_START, "vocabulary is None: give a SentencePiece model"),
        (
            NO_START | {"VOCABULARY": "bytes", "T5Config.vocab_size": 100},
            "bytes has 259 pieces, the model's vocab_size is 100: raise vocab_size",
        ),
    ],
)
def test_mistakes_are_reported_before_compilation(train, tmp_path, capfd, changes, message):
    assert train(tmp_path / "run", **changes) == 2
    error = capfd.readouterr().err
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "run" / "checkpoints").exists()
