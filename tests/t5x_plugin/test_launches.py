"""``python -m t5x.infer``, ``t5x.eval`` and ``t5x.train`` from gin to output files."""

import dataclasses
import functools
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("t5x.infer", reason="needs T5X")

import flax.core
import jax
import numpy as np
import orbax.checkpoint as ocp
import seqio
import tensorflow as tf
from etils import epath
from t5x import decoding, models, partitioning, utils
from tensorflow.compat.v1.train import summary_iterator as events_in

from spec_t5x.checkpoints.loading import load
from spec_t5x.errors import InputError
from spec_t5x.t5x_plugin.drafts import ModelDraft, NamedDraft
from spec_t5x.t5x_plugin.restoring import SpeculativeCheckpointManager, checked_path
from spec_t5x.t5x_plugin.speculation import speculate
from spec_t5x.t5x_plugin.speculative_model import draft_of
from tests.checkpoints.faults import save_t5x
from tests.child import HANGS
from tests.t5x_plugin.launches import BY_NAME, INFER, MODEL_PARALLEL, TRAINING, finished
from tests.t5x_plugin.toy_models import run_program, t5x_network

# A binding of the function that acceptance.write_inferences calls.
WITH_IDS = """
from __gin__ import dynamic_registration
import __main__ as infer_script
infer_script.write_inferences_to_file.output_ids = True
"""


@pytest.mark.parametrize(
    ("temperature", "verifier", "formats"),
    [(0.0, "block", ("legacy", "orbax")), (1.0, "coupled", ("orbax", "legacy"))],
)
def test_infer_writes_what_stock_t5x_writes(launches, temperature, verifier, formats):
    expected = launches.stock(temperature)
    (launches.directory / "with_ids.gin").write_text(WITH_IDS)
    found = launches.infer(
        [f"model_{temperature}.gin", "with_ids.gin", INFER, "draft.gin"],
        target=f"target_{formats[0]}",
        DRAFT_CHECKPOINT_PATH=launches.checkpoint(f"draft_{formats[1]}"),
        VERIFIER=verifier,
        GAMMA=3,
    )
    assert "Decoding speculatively: draft model 16 wide with 2 heads, gamma 3" in launches.log
    assert "Speculative decoding of" in launches.log
    assert "block_efficiency" in launches.log
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["inputs"] == theirs["inputs"]
        assert ours["prediction"] == theirs["prediction"]
        np.testing.assert_allclose(ours["aux"]["scores"], theirs["aux"]["scores"], atol=1e-3)
        assert ours["aux"]["target_calls"] > 0
        assert len(ours["prediction_tokens"]) == ours["aux"]["appended"]
    assert sum(line["aux"]["accepted"] for line in found) > 0
    assert len({line["prediction"] for line in found}) > 1


def test_with_the_source_in_int8_a_draft_on_several_devices_keeps_the_text(launches):
    files = ["model_0.0.gin", INFER, "draft.gin"]
    macros = {"DRAFT_CHECKPOINT_PATH": launches.checkpoint("draft_orbax"), "KV": "int8"}
    plain = launches.infer(files, GAMMA=0, **macros)
    found = launches.infer(files, GAMMA=3, devices=4, **macros, **MODEL_PARALLEL)
    assert ", kv int8" in launches.log
    assert [line["prediction"] for line in found] == [line["prediction"] for line in plain]
    assert sum(line["aux"]["accepted"] for line in found) > 0
    # Another model than T5X's.
    scores, theirs = (
        [line["aux"]["scores"] for line in lines] for lines in (plain, launches.stock(0.0))
    )
    assert not np.allclose(scores, theirs, atol=1e-3)


def test_eval_writes_metrics_and_acceptance(launches):
    output = launches.output(
        "eval",
        ["model_0.0.gin", "gin_configs/runs/t5x_eval.gin", "draft.gin"],
        CHECKPOINT_PATH=launches.checkpoint("target_legacy"),
        DRAFT_CHECKPOINT_PATH=launches.checkpoint("draft_orbax"),
        # Bindings of T5X's evaluator are honoured.
        **{"seqio.Evaluator.num_examples": 3},
    )

    def lines(name):
        (file,) = output.rglob(name)
        return [json.loads(line) for line in file.read_text().splitlines()]

    found = {name: value for line in lines("launch-metrics.jsonl") for name, value in line.items()}
    answers, expected = lines("launch-000007.jsonl"), launches.stock(0.0)[:3]
    assert [line["prediction"] for line in answers] == [line["prediction"] for line in expected]
    equal = [line["prediction"] == line["target"] for line in answers]
    assert found["equal"] == sum(equal) / len(equal)
    assert found["speculation/block_efficiency"] > 1
    assert 0 < found["speculation/alpha"] < 1


def test_an_export_to_tensorflow_decodes_batches_of_any_size(launches):
    directory = launches.directory / "exported" / "1"
    files = ["t5x/configs/runs/export.gin", "gin_configs/t5x/speculate.gin"]
    arguments, options = launches.command(
        "export",
        ["model_0.0.gin", *files, "gin_configs/t5x/export.gin", "draft.gin"],
        CHECKPOINT_PATH=launches.checkpoint("target_legacy"),
        DRAFT_CHECKPOINT_PATH=launches.checkpoint("draft_legacy"),
        MODEL_OUTPUT_DIR={"cpu": str(directory)},
        MODEL_NAME="/ml/exported",
    )
    # For examples to warm up a server with, which are not written here.
    apis = launches.directory / "stubs" / "tensorflow_serving" / "apis"
    apis.mkdir(parents=True)
    for name in ("predict_pb2", "prediction_log_pb2"):
        (apis / f"{name}.py").write_text("PredictRequest = PredictionLog = None")
    options["env"]["PYTHONPATH"] += os.pathsep + str(apis.parents[1])
    finished(arguments, options)
    expected = launches.stock(0.0)
    decode = tf.saved_model.load(str(directory)).signatures["serving_default"]
    for size in (2, len(expected)):
        lines = expected[:size]
        found = decode(tf.constant([line["inputs"]["inputs_pretokenized"] for line in lines]))
        texts = [text.decode() for text in found["output_0"].numpy()[:, 0]]
        assert texts == [line["prediction"] for line in lines]
        scores = [line["aux"]["scores"] for line in lines]
        np.testing.assert_allclose(found["output_1"].numpy()[:, 0], scores, atol=1e-3)


# --- restoring ---------------------------------------------------------------


@pytest.fixture(scope="module")
def stock_model(launches, tiny_pair):
    """Provides T5X's model of the pair's target."""
    vocabulary = seqio.SentencePieceVocabulary(str(launches.vocabulary), 0)
    network = t5x_network(load(tiny_pair / "target").config)
    options = {"optimizer_def": None, "decode_fn": decoding.temperature_sample}
    return models.EncoderDecoderModel(network, vocabulary, vocabulary, **options)


@pytest.fixture(scope="module")
def restoring(launches, stock_model):
    """Provides a function of a draft's sizes: the model, its initializer, a maker of managers."""

    def make(draft_config):
        model = speculate(stock_model, ModelDraft(config=draft_config))
        partitioner = partitioning.PjitPartitioner(num_partitions=1)
        shapes = {"encoder_input_tokens": (2, 8), "decoder_input_tokens": (2, 8)}
        initializer = utils.TrainStateInitializer(
            None, model.get_initial_variables, shapes, partitioner
        )
        path, shape = launches.checkpoint("target_orbax"), initializer.global_train_state_shape
        manager = functools.partial(SpeculativeCheckpointManager, path, shape, partitioner)
        return model, initializer, manager

    return make


def test_target_and_draft_are_restored_each_from_its_own(
    launches, stock_model, restoring, tiny_pair
):
    target, draft = load(tiny_pair / "target"), load(tiny_pair / "draft")
    model, initializer, manager = restoring(draft.config)
    scratch = initializer.from_scratch(jax.random.PRNGKey(0)).state_dict()
    # The path is a folder of checkpoints, whose latest is restored.
    folder = str(launches.directory / "draft_orbax")
    restored = manager(draft_path=folder).restore(
        path=launches.checkpoint("target_orbax"), fallback_state=scratch
    )
    params = dict(flax.core.unfreeze(restored.params))
    for expected, found in ((draft.params, params.pop("draft")), (target.params, params)):
        jax.tree.map(np.testing.assert_array_equal, found, dict(expected))
    assert restored.step == 7
    by_name = speculate(stock_model, NamedDraft(name="copy"))
    nothing = str(launches.directory / "nothing")
    for call, message in (
        (lambda: manager(draft_path=None, model=model), "is not set: .* draft_by_name.gin after"),
        (lambda: checked_path(3, has_draft=True, by_name=False), "is 3: give the path of one"),
        (lambda: manager(draft_path=nothing), "there is no draft's checkpoint .*nothing: set DRA"),
        (lambda: manager(draft_path=folder, model=by_name), "draft comes by name: leave it None"),
        (lambda: draft_of(stock_model), "model is a EncoderDecoderModel without a draft: give s"),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("form", ["legacy", "orbax"])
def test_a_draft_of_other_sizes_is_named(launches, restoring, tiny_pair, form):
    config = dataclasses.replace(load(tiny_pair / "draft").config, emb_dim=24)
    path = launches.checkpoint(f"draft_{form}")
    with pytest.raises(InputError, match=f"the draft's checkpoint {path} cannot") as raised:
        restoring(config)[2](draft_path=path).restore(path=launches.checkpoint("target_orbax"))
    assert "DRAFT_SIZE" in str(raised.value)
    assert "target/" not in str(raised.value) and "\n" not in str(raised.value)


# --- training ----------------------------------------------------------------


def steps_in(directory: Path) -> list[int]:
    """Returns the steps of a training's finished checkpoints."""
    names = (path.name for path in directory.glob("checkpoint_*") if path.is_dir())
    steps = (name.removeprefix("checkpoint_") for name in names)
    return sorted(int(step) for step in steps if step.isdigit())


def wait_for(condition, process, log: Path) -> None:
    """Waits until the condition holds; the process must not end before."""
    end = time.monotonic() + HANGS
    while not condition():
        assert process.poll() is None, log.read_text()[-6000:]
        assert time.monotonic() < end, log.read_text()[-6000:]
        time.sleep(0.1)


def metrics_of(directory: Path) -> dict[str, float]:
    """Returns the last value of each metric that T5X wrote for TensorBoard."""
    events = (event for file in sorted(directory.glob("events*")) for event in events_in(str(file)))
    values = (value for event in events for value in event.summary.value)
    return {
        value.tag: float(tf.make_ndarray(value.tensor))
        for value in values
        if not value.tensor.string_val
    }


# On 4 devices, data 2 x model 2.
DISTILLING = {"devices": 4, "TARGET_DTYPE": "float32", "WARMUP_STEPS": 1, **MODEL_PARALLEL}


def test_a_draft_is_distilled_killed_and_resumed(launches, restoring, tiny_pair):
    directory = launches.directory / "distilled"
    files = ["small_model.gin", "gin_configs/runs/t5x_distill.gin"]
    macros = {
        **TRAINING,
        **DISTILLING,
        "CHECKPOINT_PATH": launches.checkpoint("target_orbax"),
        "MODEL_DIR": str(directory),
        "RANDOM_SEED": 0,
        "DISTILLATION_WEIGHT": 0.8,
    }
    arguments, options = launches.command("train", files, TRAIN_STEPS=10**6, **macros)
    log = launches.directory / "killed.log"
    with log.open("w") as file:
        process = subprocess.Popen(arguments, **options, stdout=file, stderr=file)
        try:
            wait_for(lambda: max(steps_in(directory), default=0) >= 4, process, log)
        finally:
            process.kill()
            process.wait()
    last = max(steps_in(directory))
    resumed = launches.train(files, TRAIN_STEPS=last + 2, **macros)
    assert f"Starting main loop over steps {last}-{last + 2}" in resumed
    assert max(steps_in(directory)) == last + 2
    for folder in ("train", "training_eval/launch"):
        found = metrics_of(directory / folder)
        assert found["forward_kl"] > 0
        for temperature in (0, 1):
            assert 0 <= found[f"alpha/temperature_{temperature}"] < 1

    # The package loads it, T5X restores it beside a target, and it holds nothing else.
    loaded = load(directory, vocabulary=f"{launches.vocabulary}:0")
    draft = load(tiny_pair / "draft")
    assert jax.tree.structure(loaded.params) == jax.tree.structure(draft.params)
    sizes = {"emb_dim", "num_heads", "mlp_dim", "num_encoder_layers", "num_decoder_layers"}
    assert all(getattr(loaded.config, name) == getattr(draft.config, name) for name in sizes)
    (state,) = directory.glob(f"checkpoint_{last + 2}/state")
    stored = ocp.PyTreeCheckpointHandler(use_ocdbt=True).metadata(epath.Path(state))
    assert set(getattr(stored, "tree", stored)) == {"state", "target"}
    manager = restoring(loaded.config)[2](draft_path=str(directory))
    restored = manager.restore(path=launches.checkpoint("target_orbax"))
    params = flax.core.unfreeze(restored.params)["draft"]
    jax.tree.map(np.testing.assert_array_equal, params, dict(loaded.params))


def test_an_eagle_head_is_trained_and_drafts(launches):
    """The head drafts by name, on several devices."""
    directory = launches.directory / "head"
    macros = {
        **TRAINING,
        **DISTILLING,
        "CHECKPOINT_PATH": launches.checkpoint("target_orbax"),
        "MODEL_DIR": str(directory),
        "DRAFT_DIR": str(directory / "draft"),
        "HEAD_WIDTH": 16,
        "HEAD_DEPTHS": (0,),
    }
    files = ["model_0.0.gin", "gin_configs/runs/t5x_distill_head.gin"]
    # The second training resumes from the first one's checkpoint.
    for steps in (2, 4):
        log = launches.train(files, TRAIN_STEPS=steps, **macros)
        assert f"Starting main loop over steps {steps - 2}-{steps}" in log
        config = json.loads((directory / "draft" / "config.json").read_text())
        assert config["step"] == steps
    for folder in ("train", "training_eval/launch"):
        assert metrics_of(directory / folder)["jeffreys"] > 0
    draft = f"eagle:{directory / 'draft'}"
    found = launches.infer(
        ["model_0.0.gin", INFER, BY_NAME], devices=4, DRAFT_NAME=draft, **MODEL_PARALLEL
    )
    expected = [line["prediction"] for line in launches.stock(0.0)]
    assert [line["prediction"] for line in found] == expected
    assert all(line["aux"]["target_calls"] > 0 for line in found)
    assert sum(line["aux"]["proposed"] for line in found) > 0


def test_a_model_is_trained_from_weights_of_another_format(launches, tiny_pair):
    draft = load(tiny_pair / "draft")
    weights, directory = launches.directory / "converted" / "checkpoint_3", launches.directory / "t"
    save_t5x(weights, draft.params, draft.config)
    files = ["gin_configs/runs/t5x_train.gin", "gin_configs/t5x/from_weights.gin"]
    log = launches.train(
        ["small_model.gin", *files],
        MODEL_DIR=str(directory),
        INITIAL_CHECKPOINT_PATH=str(weights),
        TRAIN_STEPS=2,
        **TRAINING,
        **{"train.infer_eval_dataset_cfg": None},
    )
    assert "Starting main loop over steps 0-2" in log
    assert steps_in(directory) == [0, 2]
    first, last = (
        load(directory / f"checkpoint_{step}", vocabulary=f"{launches.vocabulary}:0").params
        for step in (0, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, dict(draft.params))
    moved = jax.tree.map(lambda before, after: float(abs(after - before).max()), first, last)
    assert all(jax.tree.leaves(moved))


SHARDED = """
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


def test_caches_are_sharded_over_the_partitioners_mesh():
    run_program(SHARDED, devices=8)
