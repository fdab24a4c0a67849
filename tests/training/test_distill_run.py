"""``gin_configs/runs/distill.gin``: a draft for any target, on any pairs."""

import gin
import pytest

from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.cli.main import main
from spec_t5x.generation import GenerateOptions, Generator

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_a_draft_is_trained_for_a_target_and_speeds_it_up(tiny_pair, tmp_path):
    pairs = [("My sister", "Meine Schwester liest."), ("a bird", "ein Vogel")] * 8
    (tmp_path / "train.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs))
    target, output = tiny_pair / "target", tmp_path / "draft"
    sizes = {
        **{"vocab_size": 128, "emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16},
        **{"num_encoder_layers": 1, "num_decoder_layers": 1},
    }
    bindings = [
        "MODEL_SIZE='t5_1_1_small'",
        f"CHECKPOINT_PATH='{target}'",
        f"DATA_DIR='{tmp_path}'",
        "TRAIN_FILE='train.tsv'",
        f"OUTPUT_DIR='{output}'",
        "SOURCE_PREFIX='to German: '",
        "TRAIN_STEPS=2",
        "OptimizerOptions.warmup_steps=1",
        "OptimizerOptions.cooldown_steps=0",
        "DataOptions.tokens_per_batch=64",
        *(f"T5Config.{name}={value}" for name, value in sizes.items()),
    ]
    gin.clear_config()
    flags = [f"--gin.{binding}" for binding in bindings]
    try:
        assert main(["train", "--gin_file=gin_configs/runs/distill.gin", *flags]) == 0
    finally:
        gin.clear_config()
    draft = load(output / "model")
    check_same_vocabulary(load(target), draft)
    # The activations of the published size.
    assert draft.config.mlp_activations == ("gelu", "linear")
    generator = Generator.load(target, output / "model")
    options = GenerateOptions(gamma=2, max_decode_len=6)
    (((output,),), ((plain,),)) = (
        list(which.generate(["My sister"], options)) for which in (generator, generator.plain())
    )
    assert output.output_ids == plain.output_ids
