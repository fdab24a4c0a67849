"""``spec-t5x distill``: from files and a target to a draft that ``--draft`` takes."""

import json
import re

import numpy as np
import pytest

from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.generation import GenerateOptions, Generator
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

# Out of time at once: what is exported is what it started from.
NO_STEP = {"TrainOptions__max_minutes": 1e-9}
# A draft of sizes of its own.
OF_SIZES = {"distill__layers": None, "distill__model": "@T5Config()"}


@pytest.fixture
def distill(tiny_pair, tmp_path):
    """``distill(**bindings)``: runs the command; its exit status."""
    for name, pairs in {"train": PAIRS * 4, "dev": PAIRS}.items():
        (tmp_path / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs))
    paths = {"CHECKPOINT_PATH": str(tiny_pair / "target"), "DATA_DIR": str(tmp_path)}
    given = {**paths, "OUTPUT_DIR": str(tmp_path / "output"), **BINDINGS}
    return lambda **changes: run_command("distill", "distill_draft", **given | changes)


def test_a_draft_in_the_targets_encoder_that_knows_some_tokens(distill, tiny_pair, tmp_path, capfd):
    target, output = tiny_pair / "target", tmp_path / "output"
    recipe = {"OBJECTIVE": "total_variation", "ON_POLICY": 0.5, "DRAFT_VOCAB_SIZE": 10}
    assert distill(**recipe) == 0
    said = capfd.readouterr().err
    assert "train.tsv: the target has written 12 of 12 texts (T=1)" in said
    assert "dev.tsv: the target has written 3 of 3 texts (T=0)" in said
    assert re.search(r"step 0  T=0: loss .* alpha 0\.\d+ \(.*\)  expected tokens", said)
    assert re.search(r"finished at step 2; draft in .*\n.*the best was step \d", said)

    generator = Generator.load(target, output / "draft")
    assert type(generator.draft) is SharedEncoderDraft and generator.draft.layers == (0,)
    config = json.loads((output / "draft" / "config.json").read_text())
    (held_out,) = config["held_out"]
    assert 0 < held_out["alpha"]["value"] <= 1 and held_out["temperature"] == 0.0
    # Tokens of the texts that it was trained on; in the target's text are others as well.
    known = set(np.asarray(generator.draft.model.head.ids).tolist())
    assert len(known) == 10 and 1 in known
    options = GenerateOptions(gamma=2, max_decode_len=8, batch_size=len(PAIRS))
    speculative, plain = (
        [output for (output,) in which.generate([source for source, _ in PAIRS], options)]
        for which in (generator, generator.plain())
    )
    assert [each.output_ids for each in speculative] == [each.output_ids for each in plain]
    written = {token for each in plain for token in each.output_ids}
    assert written - known and written & known

    # The same command again finds all done; texts are not written a second time.
    parts = {path: path.stat().st_mtime_ns for path in (output / "cache").rglob("*.npz")}
    assert distill(**recipe) == 0
    assert "resumed at step 2" in capfd.readouterr().err
    assert parts == {path: path.stat().st_mtime_ns for path in (output / "cache").rglob("*.npz")}
    assert json.loads((output / "draft" / "config.json").read_text()) == config


def test_a_draft_with_layers_of_its_own_on_references(distill, tiny_pair, tmp_path, capfd):
    target, output = tiny_pair / "target", tmp_path / "output"
    changes = {"ENCODER_LAYERS": "first:1", "OUTPUTS": "references"}
    assert distill(**changes, **NO_STEP, DistillOptions__train_texts=5) == 75
    said = capfd.readouterr().err
    assert "train.tsv: the target" not in said and "dev.tsv: the target has written" in said
    draft, loaded = load(output / "draft"), load(target)
    check_same_vocabulary(loaded, draft)
    assert (draft.config.num_encoder_layers, draft.config.num_decoder_layers) == (1, 1)
    assert draft.config.mlp_activations == loaded.config.mlp_activations


@pytest.mark.parametrize(
    ("width", "depths"), [(None, ()), (24, (0,))], ids=["as wide", "narrower, of two depths"]
)
def test_an_eagle_head(distill, tiny_pair, tmp_path, width, depths):
    target, output = tiny_pair / "target", tmp_path / "output"
    settings = {"DECODER_LAYERS": "last:1", "UNROLLED_STEPS": 2}
    settings |= {"HEAD_WIDTH": width, "HEAD_DEPTHS": depths}
    assert distill(**settings, OUTPUTS="references") == 0
    generator = Generator.load(target, f"eagle:{output / 'draft'}")
    assert type(generator.draft) is EagleDraft and generator.draft.layers == (1,)
    assert type(Generator.load(target, output / "draft").draft) is EagleDraft
    options = GenerateOptions(gamma=2, max_decode_len=8, batch_size=len(PAIRS))
    sources = [source for source, _ in PAIRS]
    speculative, plain = (
        each.generate(sources, options) for each in (generator, generator.plain())
    )
    assert [each.output_ids for (each,) in speculative] == [each.output_ids for (each,) in plain]


def test_a_draft_of_other_sizes_from_a_checkpoint(distill, tiny_pair, tmp_path):
    sizes = load(tiny_pair / "draft").config.to_dict()
    changes = {f"T5Config__{name}": value for name, value in sizes.items()} | OF_SIZES
    start = {"distill__initial_checkpoint": str(tiny_pair / "draft"), "OUTPUTS": "references"}
    assert distill(**changes, **start, **NO_STEP) == 75
    draft, start = load(tmp_path / "output" / "draft"), load(tiny_pair / "draft")
    assert draft.config == start.config
    assert_identical(draft.params, start.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"DEV_FILE": None}, "DataOptions has no dev file or split: give held-out data"),
        ({"DataOptions__vocabulary": "bytes"}, "leave it out, it is the target's"),
        ({"distill__layers": None}, "neither of distill.layers and distill.model given: give"),
        ({"distill__initial_checkpoint": "x"}, "initial_checkpoint is 'x' and the draft starts"),
        ({"ON_POLICY": 1.5}, "on_policy is 1.5: give 0..1"),
        ({"ENCODER_LAYERS": "every:9"}, "'every:9', of 2: give K from 1 to 2"),
        (
            {"DRAFT_VOCAB_SIZE": 9, "ENCODER_LAYERS": "all"},
            "draft_vocab_size is 9 and encoder 'all': a smaller output layer needs the 'shared'",
        ),
        (
            {"UNROLLED_STEPS": 2, "ENCODER_LAYERS": "all"},
            "unrolled_steps is 2 and encoder 'all': a draft that continues from the target's",
        ),
        ({"UNROLLED_STEPS": 2, "ON_POLICY": 0.5}, "on_policy is 0.5 and unrolled_steps 2: a draft"),
        ({"HEAD_WIDTH": 24}, "width is 24 and unrolled_steps 0: it is of a draft that continues"),
        ({"HEAD_DEPTHS": (0,)}, "depths is (0,) and unrolled_steps 0: it is of a draft that"),
        ({"KeptLayers.reads_source": False}, "reads_source is False and unrolled_steps 0: it is"),
        ({"HEAD_DEPTHS": (9,), "UNROLLED_STEPS": 2}, "layers [9] are wanted of a decoder of 2"),
        ({"HEAD_WIDTH": 999, "UNROLLED_STEPS": 2}, "width is 999 and the target's 32: give less"),
        ({"MAX_TARGET_LENGTH": 17}, "17 tokens and the largest of DataOptions.buckets is 16"),
        (
            {"DRAFT_VOCAB_SIZE": 9, "TrainOptions.label_smoothing": 0.1},
            "label_smoothing is 0.1: leave it 0 for a draft",
        ),
        (OF_SIZES, "the target's vocab_size is 128, the draft's 32128: make them equal"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(distill, tmp_path, capfd, changes, message):
    assert distill(**changes) == 2
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "output").exists()
