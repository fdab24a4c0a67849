"""``spec-t5x distill``: from files and a target to a draft that ``--draft`` takes."""

import json
import re

import numpy as np
import pytest

from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.training import run_distill
from tests.labs.training.toys import assert_identical, run_command

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

PAIRS = [("My sister", "Meine Schwester liest."), ("a bird", "ein Vogel"), ("We go", "Wir")]
BINDINGS = {
    "DEV_FILE": "dev.tsv",
    "TRAIN_FILE": "train.tsv",
    "SOURCE_PREFIX": "to German: ",
    "TRAIN_STEPS": 2,
    "MAX_SOURCE_LENGTH": 16,
    "MAX_TARGET_LENGTH": 16,
    "DECODER_LAYERS": "every:2",
    "DataOptions.buckets": (16,),
    "DataOptions.tokens_per_batch": 64,
    "DistillOptions.eval_temperatures": (0.0,),
    "OptimizerOptions.warmup_steps": 1,
    "OptimizerOptions.cooldown_steps": 0,
    "TrainOptions.eval_period": 1,
    "distill.export_dtype": "float32",
}

# Out of time at once: the export is the start.
NO_STEP = {"TrainOptions__max_minutes": 1e-9}
OF_SIZES = {"distill__layers": None, "distill__model": "@T5Config()"}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output"


@pytest.fixture
def distill(tiny_pair, tmp_path, output):
    """Provides ``distill(**bindings)``, which runs the command and returns its exit status."""
    for name, pairs in {"train": PAIRS * 4, "dev": PAIRS}.items():
        (tmp_path / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs))
    paths = {"CHECKPOINT_PATH": str(tiny_pair / "target"), "DATA_DIR": str(tmp_path)}
    given = {**paths, "OUTPUT_DIR": str(output), **BINDINGS}
    return lambda **changes: run_command("distill", "distill_draft", **given | changes)


def ids_of_both(generator):
    """Returns the ids of speculative decoding, which must be those of plain decoding."""
    options = GenerateOptions(gamma=2, max_decode_len=8, batch_size=len(PAIRS))
    speculative, plain = (
        [each.output_ids for (each,) in which.generate([source for source, _ in PAIRS], options)]
        for which in (generator, generator.plain())
    )
    assert speculative == plain
    return plain


def test_a_draft_in_the_targets_encoder_with_some_tokens(distill, tiny_pair, output, capfd):
    recipe = {"OBJECTIVE": "total_variation", "ON_POLICY": 0.5, "DRAFT_VOCAB_SIZE": 10}
    assert distill(**recipe) == 0
    log = capfd.readouterr().err
    assert "train.tsv: the target has written 12 of 12 texts (T=1)" in log
    assert "dev.tsv: the target has written 3 of 3 texts (T=0)" in log
    assert re.search(r"step 0  T=0: loss .* alpha 0\.\d+ \(.*\)  expected tokens", log)
    assert re.search(r"finished at step 2; draft in .*\n.*the best was step \d", log)

    generator = Generator.load(tiny_pair / "target", output / "draft")
    assert type(generator.draft) is SharedEncoderDraft and generator.draft.layers == (0,)
    config = json.loads((output / "draft" / "config.json").read_text())
    (held_out,) = config["held_out"]
    assert 0 < held_out["alpha"]["value"] <= 1 and held_out["temperature"] == 0.0
    # Tokens of the training texts; the target's text contains others as well.
    known = set(np.asarray(generator.draft.model.head.ids).tolist())
    assert len(known) == 10 and 1 in known
    written = {token for ids in ids_of_both(generator) for token in ids}
    assert written - known and written & known

    # The same command again resumes at the end; texts are not written a second time.
    parts = {path: path.stat().st_mtime_ns for path in (output / "cache").rglob("*.npz")}
    assert parts and distill(**recipe) == 0
    assert "resumed at step 2" in capfd.readouterr().err
    assert parts == {path: path.stat().st_mtime_ns for path in (output / "cache").rglob("*.npz")}
    assert json.loads((output / "draft" / "config.json").read_text()) == config


def test_a_run_is_resumed_with_what_it_was_started_with_alone(
    distill, tiny_pair, tmp_path, output, capfd, monkeypatch
):
    assert distill(OUTPUTS="references", **NO_STEP) == 75
    capfd.readouterr()
    (tmp_path / "other.tsv").write_text("a bird\tein Vogel\n")
    # Refused before anything is sampled.
    monkeypatch.setattr(run_distill, "sample_targets", None)
    for changes, name in (
        ({"CHECKPOINT_PATH": str(tiny_pair / "draft"), "DECODER_LAYERS": "all"}, "target"),
        ({"DEV_FILE": "other.tsv"}, "held-out set"),
        ({"DistillOptions__dev_texts": 2}, "held-out set"),
        ({"DistillOptions__eval_temperatures": (1.0,)}, "held-out set"),
        ({"DECODER_LAYERS": "last:1"}, "draft"),
        ({"TRAIN_FILE": "other.tsv"}, "training set or seed"),
        ({"TrainOptions__seed": 1}, "training set or seed"),
        ({"OUTPUTS": "target"}, "training set or seed"),
    ):
        assert distill(**{"OUTPUTS": "references", **changes}) == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert f"{output} are of a run with another {name}: give the earlier one, or" in error
    monkeypatch.undo()
    # After step 0 no batch was read, so that smaller ones are a remedy for too little memory.
    assert distill(OUTPUTS="references", DataOptions__tokens_per_batch=32) == 0
    assert distill(OUTPUTS="references") == 2
    assert "or batches of another size" in capfd.readouterr().err


def test_a_draft_with_separate_layers_on_references(distill, tiny_pair, output, capfd):
    changes = {"ENCODER_LAYERS": "first:1", "OUTPUTS": "references"}
    assert distill(**changes, **NO_STEP, DistillOptions__train_texts=5) == 75
    log = capfd.readouterr().err
    assert "train.tsv: the target" not in log and "dev.tsv: the target has written" in log
    draft, loaded = load(output / "draft"), load(tiny_pair / "target")
    check_same_vocabulary(loaded, draft)
    assert (draft.config.num_encoder_layers, draft.config.num_decoder_layers) == (1, 1)
    assert draft.config.mlp_activations == loaded.config.mlp_activations
    assert draft.metadata["max_source_length"] == 16


@pytest.mark.parametrize(
    ("width", "depths"), [(None, ()), (24, (0,))], ids=["as wide", "narrower, of two depths"]
)
def test_an_eagle_head(distill, tiny_pair, output, width, depths):
    settings = {"DECODER_LAYERS": "last:1", "UNROLLED_STEPS": 2, "OUTPUTS": "references"}
    assert distill(**settings, HEAD_WIDTH=width, HEAD_DEPTHS=depths) == 0
    named, found = (
        Generator.load(tiny_pair / "target", draft)
        for draft in (f"eagle:{output / 'draft'}", output / "draft")
    )
    assert type(named.draft) is type(found.draft) is EagleDraft and named.draft.layers == (1,)
    ids_of_both(named)


def test_a_draft_of_other_sizes_from_a_checkpoint(distill, tiny_pair, output):
    start = load(tiny_pair / "draft")
    changes = {f"T5Config__{name}": value for name, value in start.config.to_dict().items()}
    changes |= {"distill__initial_checkpoint": str(tiny_pair / "draft"), "OUTPUTS": "references"}
    assert distill(**changes, **OF_SIZES, **NO_STEP) == 75
    draft = load(output / "draft")
    assert draft.config == start.config
    assert_identical(draft.params, start.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Found before the target is read, which may be a download.
        ({"DEV_FILE": "absent.tsv", "CHECKPOINT_PATH": "absent"}, "/absent.tsv: give the path of"),
        ({"DEV_FILE": None}, "DataOptions has no dev file or split: give held-out data"),
        ({"DataOptions__vocabulary": "bytes"}, "leave it out, because a draft has"),
        ({"distill__layers": None}, "neither of distill.layers and distill.model given: give"),
        ({"distill__initial_checkpoint": "x"}, "initial_checkpoint is 'x' and the draft starts"),
        ({"ON_POLICY": 1.5}, "on_policy is 1.5: give a number from 0 to 1"),
        ({"ENCODER_LAYERS": "every:9"}, "'every:9', of 2: give K from 1 to 2"),
        (
            {"DRAFT_VOCAB_SIZE": 9, "ENCODER_LAYERS": "all"},
            "draft_vocab_size is 9 and encoder 'all', and it needs the 'shared' encoder",
        ),
        ({"UNROLLED_STEPS": 2, "ENCODER_LAYERS": "all"}, "unrolled_steps is 2 and encoder 'all'"),
        ({"UNROLLED_STEPS": 2, "ON_POLICY": 0.5}, "on_policy is 0.5 and unrolled_steps 2: a draft"),
        ({"HEAD_WIDTH": 24}, "width is 24 and unrolled_steps 0, and only drafts that continue f"),
        ({"HEAD_DEPTHS": (0,)}, "depths is (0,) and unrolled_steps 0, and only drafts"),
        ({"KeptLayers.reads_source": False}, "reads_source is False and unrolled_steps 0, and"),
        ({"HEAD_DEPTHS": (9,), "UNROLLED_STEPS": 2}, "states of layers [9], the decoder has 2"),
        ({"HEAD_WIDTH": 999, "UNROLLED_STEPS": 2}, "width is 999 and the target's 32: give less"),
        ({"MAX_TARGET_LENGTH": 17}, "17 tokens and the largest of DataOptions.buckets is 16"),
        (
            {"DRAFT_VOCAB_SIZE": 9, "TrainOptions.label_smoothing": 0.1},
            "label_smoothing is 0.1 and the draft does not have all tokens: leave it out",
        ),
        ({"DistillOptions__patience": 1, "TrainOptions.eval_period": 0}, "patience is 1 and eval"),
        ({"DataOptions__packed": True}, "packed is True and drafts learn from one pair a row"),
        ({"DataOptions__metric": "rouge"}, "metric is 'rouge' and no texts of a draft are scored"),
        ({"TrainOptions__z_loss": 0.1}, "z_loss is 0.1 and distillation_weight 1, which leaves"),
        (
            {"OUTPUTS": "references", "DistillOptions__temperature": 0.5},
            "temperature is 0.5 and no text is sampled to train on",
        ),
        (
            OF_SIZES | {"KeptLayers__dropout_rate": 0.1},
            "nothing uses --gin.KeptLayers.dropout_rate: leave it out, or bind @KeptLayers()",
        ),
        (OF_SIZES, "the target's vocab_size is 128, the draft's 32128: make them equal"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(distill, output, capfd, changes, message):
    assert distill(**changes) == 2
    # TensorFlow writes others, once in a process.
    lines = capfd.readouterr().err.splitlines()
    (line,) = [each for each in lines if not re.match(r"[EIW]\d{4} |WARNING: All log", each)]
    assert message in line
    assert not output.exists()
