"""``python -m t5x.infer`` and ``t5x.eval`` from gin to output files, with two checkpoints."""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("t5x.infer", reason="needs T5X")

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import seqio
import tensorflow as tf
from etils import epath
from t5x import adafactor, checkpoints, decoding, models, partitioning, train_state, utils
from tensorflow.compat.v1.train import summary_iterator as events_in

from spec_t5x.checkpoints.loading import load
from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.drafts import ModelDraft, NamedDraft
from spec_t5x.t5x_plugin.restoring import SpeculativeCheckpointManager, checked_path, draft_of
from spec_t5x.t5x_plugin.speculation import speculate
from tests.checkpoints.faults import save_t5x
from tests.named_drafts import named
from tests.t5x_plugin.toy_models import REPOSITORY, environment, run_program, t5x_network

# A model file as T5X's examples have them, at the size of the tests' pair.
MODEL_GIN = """
from __gin__ import dynamic_registration
import seqio
from t5x import adafactor
from t5x import decoding
from t5x import models
from t5x.examples.t5 import network

VOCABULARY = @seqio.SentencePieceVocabulary()
seqio.SentencePieceVocabulary.sentencepiece_model_file = "{vocabulary}"
seqio.SentencePieceVocabulary.extra_ids = 0
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = @adafactor.Adafactor()
  decode_fn = @decoding.temperature_sample
decoding.temperature_sample:
  temperature = {temperature}
  topk = 0
  rescale_log_probs = False
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 128
  emb_dim = 32
  num_heads = 2
  num_encoder_layers = 2
  num_decoder_layers = 2
  head_dim = 8
  mlp_dim = 48
  mlp_activations = ("gelu", "linear")
  dropout_rate = 0.0
  logits_via_embedding = False
"""
DRAFT_GIN = """
from __gin__ import dynamic_registration
from spec_t5x.models import t5
from spec_t5x.t5x_plugin import drafts
drafts.ModelDraft:
  size = None
  config = @t5.T5Config()
t5.T5Config:
  vocab_size = 128
  emb_dim = 16
  num_heads = 2
  num_encoder_layers = 1
  num_decoder_layers = 1
  head_dim = 8
  mlp_dim = 48
  mlp_activations = ("gelu", "linear")
  logits_via_embedding = False
"""
# The draft's sizes as a model's own file: what is trained.
SMALL_MODEL_GIN = """
include "{directory}/model_0.0.gin"
models.EncoderDecoderModel.z_loss = 0.0001
network.T5Config:
  emb_dim = 16
  num_encoder_layers = 1
  num_decoder_layers = 1
  dropout_rate = %DROPOUT_RATE
"""

# Two devices to each model.
MODEL_PARALLEL = {
    "partitioning.PjitPartitioner.num_partitions": None,
    "partitioning.PjitPartitioner.model_parallel_submesh": (1, 1, 1, 2),
}


class Launches:
    """A folder with checkpoints that T5X wrote, and what is run in it."""

    def __init__(self, directory: Path, pair: Path):
        self.directory = directory
        self.vocabulary = pair / "target" / "spiece.model"
        for temperature in (0.0, 1.0):
            text = MODEL_GIN.format(vocabulary=self.vocabulary, temperature=temperature)
            (directory / f"model_{temperature}.gin").write_text(text)
        (directory / "draft.gin").write_text(DRAFT_GIN)
        (directory / "small_model.gin").write_text(SMALL_MODEL_GIN.format(directory=directory))
        for name in ("target", "draft"):
            self._save(name, load(pair / name))

    def _save(self, name: str, loaded) -> None:
        """A checkpoint of each of T5X's formats, optimizer state and all."""
        module = t5x_network(loaded.config)
        tokens = jnp.ones((1, 2), jnp.int32)
        axes = jax.eval_shape(
            lambda: module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)
        )["params_axes"]
        variables = flax.core.freeze({"params": loaded.params, "params_axes": axes})
        optimizer = adafactor.Adafactor(decay_rate=0.8)
        state = train_state.FlaxOptimTrainState.create(optimizer, variables)
        state = state.replace_step(jnp.array(7))
        partitioner = partitioning.PjitPartitioner(num_partitions=1)
        legacy, orbax = self.directory / f"{name}_legacy", self.directory / f"{name}_orbax"
        checkpoints.Checkpointer(state, partitioner, str(legacy)).save(state)
        orbax.mkdir()
        manager = checkpoints.OrbaxCheckpointManagerInterface(str(orbax), state, partitioner)
        manager.save(state)
        manager.wait_until_finished()
        manager.close()

    def run(self, program: str, files: list[str], *, devices: int = 1, **macros) -> Path:
        """Runs a program of T5X; returns its output directory."""
        output = self.directory / f"out_{len(list(self.directory.glob('out_*')))}"
        macros |= {
            f"{program.upper()}_OUTPUT_DIR": str(output),
            "utils.DatasetConfig.batch_size": 8,
        }
        arguments, options = self.command(program, files, devices=devices, **macros)
        done = subprocess.run(arguments, **options, capture_output=True)
        assert done.returncode == 0, done.stderr[-6000:]
        self.log = done.stderr
        return output

    def command(self, program: str, files: list[str], *, devices: int = 1, **macros):
        """A launch on the toy task: what ``subprocess`` is given."""
        files = [str(self.directory / name) if "/" not in name else name for name in files]
        macros |= {
            "MIXTURE_OR_TASK_NAME": "launch",
            "MIXTURE_OR_TASK_MODULE": "tests.t5x_plugin.launch_task",
            "TASK_FEATURE_LENGTHS": {"inputs": 24, "targets": 20},
            "utils.RestoreCheckpointConfig.dtype": "float32",
        }
        flags = [f"--gin.{name}={value!r}" for name, value in macros.items()]
        variables = environment(devices) | {"LAUNCH_VOCABULARY": str(self.vocabulary)}
        arguments = [sys.executable, "-m", f"t5x.{program}"]
        arguments += [*(f"--gin_file={file}" for file in files), *flags]
        return arguments, {"cwd": REPOSITORY, "env": variables, "text": True}

    def checkpoint(self, name: str) -> str:
        """The path of a checkpoint, such as ``target_legacy``."""
        return str(self.directory / name / "checkpoint_7")


@pytest.fixture(scope="module")
def launches(tmp_path_factory, tiny_pair):
    return Launches(tmp_path_factory.mktemp("launches"), tiny_pair)


def predictions(output: Path) -> list[dict]:
    (file,) = output.glob("launch-*.jsonl-00000-of-00001")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def stock(launches):
    """``stock(temperature, checkpoint)``: what T5X's own ``infer`` writes."""

    @functools.cache
    def run(temperature: float, checkpoint: str) -> list[dict]:
        files = [f"model_{temperature}.gin", "t5x/configs/runs/infer.gin"]
        options = {"CHECKPOINT_PATH": launches.checkpoint(checkpoint)}
        options |= {"infer.mode": "predict_with_aux"}
        return predictions(launches.run("infer", files, **options))

    return run


SPECULATIVE = ["gin_configs/runs/t5x_infer.gin", "draft.gin"]


@pytest.mark.parametrize(
    ("temperature", "verifier", "formats"),
    [(0.0, "block", ("legacy", "orbax")), (1.0, "coupled", ("orbax", "legacy"))],
)
def test_infer_writes_what_stock_t5x_writes(launches, stock, temperature, verifier, formats):
    target, draft = (
        f"{name}_{form}" for name, form in zip(("target", "draft"), formats, strict=True)
    )
    expected = stock(temperature, target)
    macros = {"DRAFT_CHECKPOINT_PATH": launches.checkpoint(draft), "VERIFIER": verifier, "GAMMA": 3}
    macros["CHECKPOINT_PATH"] = launches.checkpoint(target)
    # Data 4 x model 2; the stock run has one device.
    files = [f"model_{temperature}.gin", *SPECULATIVE]
    found = predictions(launches.run("infer", files, devices=8, **macros, **MODEL_PARALLEL))
    assert "Decoding speculatively: draft model 16 wide with 2 heads, gamma 3" in launches.log
    assert "Speculative decoding of" in launches.log
    assert "block_efficiency" in launches.log
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["inputs"] == theirs["inputs"]
        assert ours["prediction"] == theirs["prediction"]
        np.testing.assert_allclose(ours["aux"]["scores"], theirs["aux"]["scores"], atol=1e-3)
        assert ours["aux"]["target_calls"] > 0
    assert sum(line["aux"]["accepted"] for line in found) > 0
    assert len({line["prediction"] for line in found}) > 1


def test_eval_writes_metrics_and_acceptance(launches, stock):
    output = launches.run(
        "eval",
        ["model_0.0.gin", "gin_configs/runs/t5x_eval.gin", "draft.gin"],
        CHECKPOINT_PATH=launches.checkpoint("target_legacy"),
        DRAFT_CHECKPOINT_PATH=launches.checkpoint("draft_orbax"),
    )

    def lines(name):
        (file,) = output.rglob(name)
        return [json.loads(line) for line in file.read_text().splitlines()]

    found = {name: value for line in lines("launch-metrics.jsonl") for name, value in line.items()}
    answers, expected = lines("launch-000007.jsonl"), stock(0.0, "target_legacy")
    assert [line["prediction"] for line in answers] == [line["prediction"] for line in expected]
    equal = [line["prediction"] == line["target"] for line in answers]
    assert found["equal"] == sum(equal) / len(equal)
    assert found["speculation/block_efficiency"] > 1
    assert 0 < found["speculation/alpha"] < 1


def test_infer_with_a_draft_by_name(launches, stock, drafts_of_pair):
    output = launches.run(
        "infer",
        ["model_0.0.gin", "gin_configs/runs/t5x_infer.gin", "gin_configs/t5x/draft_by_name.gin"],
        devices=4,
        CHECKPOINT_PATH=launches.checkpoint("target_legacy"),
        DRAFT_NAME=named("mixed:{}/narrow", drafts_of_pair),
        **MODEL_PARALLEL,
    )
    found = predictions(output)
    expected = stock(0.0, "target_legacy")
    assert [line["prediction"] for line in found] == [line["prediction"] for line in expected]
    assert all(line["aux"]["target_calls"] > 0 for line in found)
    assert sum(line["aux"]["proposed"] for line in found) > 0


def stock_model(launches, tiny_pair):
    """T5X's model of the pair's target, which decodes greedily."""
    vocabulary = seqio.SentencePieceVocabulary(str(launches.vocabulary), 0)
    network = t5x_network(load(tiny_pair / "target").config)
    options = {"optimizer_def": None, "decode_fn": decoding.temperature_sample}
    return models.EncoderDecoderModel(network, vocabulary, vocabulary, **options)


def restoring(launches, tiny_pair, draft_config):
    """The speculative model of the pair, and what makes a manager that restores it."""
    model = speculate(stock_model(launches, tiny_pair), ModelDraft(config=draft_config))
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    shapes = {"encoder_input_tokens": (2, 8), "decoder_input_tokens": (2, 8)}
    initializer = utils.TrainStateInitializer(
        None, model.get_initial_variables, shapes, partitioner
    )
    manager = functools.partial(
        SpeculativeCheckpointManager,
        launches.checkpoint("target_orbax"),
        initializer.global_train_state_shape,
        partitioner,
    )
    return model, initializer, manager


def test_target_and_draft_are_restored_each_from_its_own(launches, tiny_pair):
    target, draft = load(tiny_pair / "target"), load(tiny_pair / "draft")
    model, initializer, manager = restoring(launches, tiny_pair, draft.config)
    scratch = initializer.from_scratch(jax.random.PRNGKey(0)).state_dict()
    # A folder of checkpoints: the latest is taken.
    restored = manager(draft_path=str(launches.directory / "draft_orbax")).restore(
        path=launches.checkpoint("target_orbax"), fallback_state=scratch
    )
    params = dict(flax.core.unfreeze(restored.params))
    for expected, found in ((draft.params, params.pop("draft")), (target.params, params)):
        jax.tree.map(np.testing.assert_array_equal, found, dict(expected))
    assert restored.step == 7
    with pytest.raises(InputError, match="CHECKPOINT_PATH is not set: .* draft_by_name.gin after"):
        manager(draft_path=None, model=model)
    with pytest.raises(InputError, match="DRAFT_CHECKPOINT_PATH is 3: give the path of one"):
        checked_path(3, has_draft=True, by_name=False)
    with pytest.raises(InputError, match="there is no draft's checkpoint .*nothing: set DRAFT_CH"):
        manager(draft_path=str(launches.directory / "nothing"))
    by_name = speculate(stock_model(launches, tiny_pair), NamedDraft(name="copy"))
    with pytest.raises(InputError, match="the draft comes by name: leave it None"):
        manager(draft_path=str(launches.directory / "draft_orbax"), model=by_name)
    with pytest.raises(InputError, match="MODEL is a EncoderDecoderModel without a draft: give s"):
        draft_of(stock_model(launches, tiny_pair))


@pytest.mark.parametrize("form", ["legacy", "orbax"])
def test_a_draft_of_other_sizes_is_named(launches, tiny_pair, form):
    config = dataclasses.replace(load(tiny_pair / "draft").config, emb_dim=24)
    _, _, manager = restoring(launches, tiny_pair, config)
    path = launches.checkpoint(f"draft_{form}")
    with pytest.raises(InputError, match=f"the draft's checkpoint {path} cannot") as raised:
        manager(draft_path=path).restore(path=launches.checkpoint("target_orbax"))
    assert "DRAFT_SIZE" in str(raised.value)
    assert "target/" not in str(raised.value)
    assert "\n" not in str(raised.value)


def steps_in(directory: Path) -> list[int]:
    """The finished checkpoints of a training."""
    names = (path.name for path in directory.glob("checkpoint_*") if path.is_dir())
    steps = (name.removeprefix("checkpoint_") for name in names)
    return sorted(int(step) for step in steps if step.isdigit())


def wait_for(condition, process, log: Path, seconds: float = 300.0) -> None:
    """Until it holds; the process is to go on until then."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < end, log.read_text()[-6000:]
        time.sleep(0.1)


def metrics_of(directory: Path) -> dict[str, float]:
    """The last value of each metric that T5X wrote for TensorBoard."""
    events = (event for file in sorted(directory.glob("events*")) for event in events_in(str(file)))
    values = (value for event in events for value in event.summary.value)
    return {
        value.tag: float(tf.make_ndarray(value.tensor))
        for value in values
        if not value.tensor.string_val
    }


# On 4 devices, data 2 x model 2.
DISTILLING = {
    "TARGET_DTYPE": "float32",
    "BATCH_SIZE": 4,
    "EVAL_STEPS": 1,
    "EVAL_PERIOD": 2,
    "CHECKPOINT_PERIOD": 2,
    "WARMUP_STEPS": 1,
    **MODEL_PARALLEL,
}
DISTILL = ["small_model.gin", "gin_configs/runs/t5x_distill.gin"]


def test_a_draft_is_distilled_killed_and_goes_on(launches, tiny_pair):
    directory = launches.directory / "distilled"
    macros = {
        **DISTILLING,
        "CHECKPOINT_PATH": launches.checkpoint("target_orbax"),
        "MODEL_DIR": str(directory),
        "RANDOM_SEED": 0,
        "DISTILLATION_WEIGHT": 0.8,
    }
    arguments, options = launches.command(
        "train", DISTILL, devices=4, TRAIN_STEPS=10**6, **dict(macros)
    )
    log = launches.directory / "killed.log"
    with log.open("w") as file:
        process = subprocess.Popen(arguments, **options, stdout=file, stderr=file)
        try:
            wait_for(lambda: max(steps_in(directory), default=0) >= 4, process, log)
        finally:
            process.kill()
            process.wait()
    last = max(steps_in(directory))
    arguments, options = launches.command(
        "train", DISTILL, devices=4, TRAIN_STEPS=last + 2, **dict(macros)
    )
    done = subprocess.run(arguments, **options, capture_output=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"Starting main loop over steps {last}-{last + 2}" in done.stderr
    assert max(steps_in(directory)) == last + 2
    for folder in ("train", "training_eval/launch"):
        found = metrics_of(directory / folder)
        assert found["forward_kl"] > 0
        for temperature in (0, 1):
            assert 0 <= found[f"alpha/temperature_{temperature}"] < 1
    check_is_a_draft(launches, directory, tiny_pair)


def check_is_a_draft(launches, directory, tiny_pair):
    """The package loads it, T5X restores it beside a target, and it holds nothing else."""
    loaded = load(directory, vocabulary=f"{launches.vocabulary}:0")
    draft = load(tiny_pair / "draft")
    assert jax.tree.structure(loaded.params) == jax.tree.structure(draft.params)
    sizes = {"emb_dim", "num_heads", "mlp_dim", "num_encoder_layers", "num_decoder_layers"}
    assert all(getattr(loaded.config, name) == getattr(draft.config, name) for name in sizes)
    (state,) = directory.glob(f"checkpoint_{max(steps_in(directory))}/state")
    stored = ocp.PyTreeCheckpointHandler(use_ocdbt=True).metadata(epath.Path(state))
    assert set(getattr(stored, "tree", stored)) == {"state", "target"}
    _, _, manager = restoring(launches, tiny_pair, loaded.config)
    restored = manager(draft_path=str(directory)).restore(path=launches.checkpoint("target_orbax"))
    params = flax.core.unfreeze(restored.params)["draft"]
    jax.tree.map(np.testing.assert_array_equal, params, dict(loaded.params))


def test_an_eagle_head_is_trained_and_drafts(launches, stock):
    directory = launches.directory / "head"
    macros = {
        **DISTILLING,
        "CHECKPOINT_PATH": launches.checkpoint("target_orbax"),
        "MODEL_DIR": str(directory),
        "DRAFT_DIR": str(directory / "draft"),
        "HEAD_WIDTH": 16,
        "HEAD_DEPTHS": (0,),
    }
    files = ["model_0.0.gin", "gin_configs/runs/t5x_distill_head.gin"]
    # The second goes on from the first one's checkpoint.
    for steps in (2, 4):
        arguments, options = launches.command(
            "train", files, devices=4, TRAIN_STEPS=steps, **macros
        )
        done = subprocess.run(arguments, **options, capture_output=True)
        assert done.returncode == 0, done.stderr[-6000:]
        assert f"Starting main loop over steps {steps - 2}-{steps}" in done.stderr
        config = json.loads((directory / "draft" / "config.json").read_text())
        assert config["step"] == steps
    for folder in ("train", "training_eval/launch"):
        assert metrics_of(directory / folder)["jeffreys"] > 0
    output = launches.run(
        "infer",
        ["model_0.0.gin", "gin_configs/runs/t5x_infer.gin", "gin_configs/t5x/draft_by_name.gin"],
        devices=4,
        CHECKPOINT_PATH=launches.checkpoint("target_legacy"),
        DRAFT_NAME=f"eagle:{directory / 'draft'}",
        **MODEL_PARALLEL,
    )
    found, expected = predictions(output), stock(0.0, "target_legacy")
    assert [line["prediction"] for line in found] == [line["prediction"] for line in expected]
    assert sum(line["aux"]["proposed"] for line in found) > 0


def test_a_model_is_trained_from_weights_of_another_format(launches, tiny_pair):
    draft = load(tiny_pair / "draft")
    weights = launches.directory / "converted" / "checkpoint_3"
    save_t5x(weights, draft.params, draft.config)
    directory = launches.directory / "trained"
    arguments, options = launches.command(
        "train",
        [
            "small_model.gin",
            "gin_configs/runs/t5x_train.gin",
            "gin_configs/t5x/from_weights.gin",
        ],
        MODEL_DIR=str(directory),
        INITIAL_CHECKPOINT_PATH=str(weights),
        TRAIN_STEPS=2,
        BATCH_SIZE=4,
        EVAL_STEPS=1,
        EVAL_PERIOD=2,
        CHECKPOINT_PERIOD=2,
        **{"train.infer_eval_dataset_cfg": None},
    )
    done = subprocess.run(arguments, **options, capture_output=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "Starting main loop over steps 0-2" in done.stderr
    assert steps_in(directory) == [0, 2]
    first, last = (
        load(directory / f"checkpoint_{step}", vocabulary=f"{launches.vocabulary}:0").params
        for step in (0, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, dict(draft.params))
    moved = jax.tree.map(lambda before, after: float(abs(after - before).max()), first, last)
    assert all(jax.tree.leaves(moved))


SHARDED = """
import re
from t5x import partitioning, utils
from tests.t5x_plugin.toy_models import make_batch, make_pair

model, params = make_pair("1.1").speculative(gamma=3)
partitioner = partitioning.PjitPartitioner(
    model_parallel_submesh=(1, 1, 1, 2),
    logical_axis_rules=partitioning.standard_logical_axis_rules(),
)
batch = make_batch(8)
shapes = {name: values.shape for name, values in batch.items()}
state = utils.TrainStateInitializer(None, model.get_initial_variables, shapes, partitioner)
predict = partitioner.partition(
    lambda params, batch: model.predict_batch_with_aux(
        params, batch, decoder_params={"temperature": 0.0, "topk": 0}
    ),
    in_axis_resources=(state.train_state_axes.params, partitioner.data_partition_spec),
    out_axis_resources=None,
)
import flax
text = partitioner.compile(predict, flax.core.freeze(params), batch).as_text()
# Room for 16 tokens and a block of 4; 8 rows over 4, 2 heads over 2.
assert "f32[2,1,20,8]" in text
assert "f32[8,2,20,8]" not in text
"""


def test_caches_lie_on_the_partitioners_mesh():
    run_program(SHARDED, devices=8)
