"""Run by ``test_layout.py`` with 4 simulated devices: trains on one of them and on meshes,
and prints what is to be compared as JSON."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.own.native import save_model
from spec_t5x.data.batching import Batches
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.models.heads import HeadsConfig
from spec_t5x.models.kept_layers import keep_layers, own_params
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.training.distill import DistillOptions, DraftLearner, Student
from spec_t5x.training.layout import Layout
from spec_t5x.training.learners import HeadsLearner, Network
from spec_t5x.training.optimizers import OptimizerOptions
from spec_t5x.training.text_metrics import MetricsOptions, TextMetrics
from spec_t5x.training.trainer import TrainOptions, fit, init_state
from tests.training.toys import copy_batches, toy_config

CONFIG = toy_config(384, 16, logits_via_embedding=False, dropout_rate=0.0)
RATE = 1e-2
ALONE, MESH = {"data_parallel": 1}, {"data_parallel": 2, "model_parallel": 2}


def make_batches(rows: int) -> Batches:
    return copy_batches(64, rows=rows)


def options(steps: int, **more) -> TrainOptions:
    return TrainOptions(
        steps=steps,
        log_period=1,
        eval_period=0,
        checkpoint_period=3,
        prng_impl="threefry2x32",
        **more,
    )


def train(directory: Path, steps: int, texts=False, **more):
    """5 rows do not divide by two devices and two parts."""

    def write_texts(step, write):
        sources = [[*range(2 + first, 8), 1] for first in range(5)]
        (directory / "texts.json").write_text(json.dumps(write(sources)))
        return {}

    scorer = TextMetrics(
        evaluate=write_texts,
        config=CONFIG,
        vocabulary=ByteVocabulary(),
        options=MetricsOptions(batch_size=5),
        longest=(8, 8),
        export_dtype="float32",
    )
    return fit(
        Network(CONFIG, options(steps, accumulation_steps=2, **more)),
        OptimizerOptions().optimizer(lambda step: RATE),
        lambda step: RATE,
        make_batches(5),
        make_batches(5) if texts else None,
        directory,
        scorer=scorer if texts else None,
    )


def losses(directory: Path, name="loss") -> list[float]:
    lines = map(json.loads, (directory / "metrics.jsonl").open())
    return [line[name] for line in lines if name in line]


def specs(tree) -> dict[str, list]:
    """How each array lies, as a list of axes."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = list(getattr(leaf, "sharding", leaf).spec)
        while axes and axes[-1] is None:
            axes.pop()
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = axes
    return found


def main(folder: Path) -> dict:
    report = {}
    alone, mesh = folder / "alone", folder / "mesh"
    # The second begins on a mesh and resumes on one device.
    train(alone, 3, texts=True, **ALONE)
    result = train(mesh, 3, texts=True, **MESH)
    for directory in (alone, mesh):
        train(directory, 4, **ALONE)
    report["adamw"] = {"alone": losses(alone), "mesh": losses(mesh)}
    report["adamw_specs"] = specs(result.state)
    report["dev"] = [losses(directory, "dev_loss") for directory in (alone, mesh)]
    report["texts"] = [
        json.loads((directory / "texts.json").read_text()) for directory in (alone, mesh)
    ]

    learner = Network(CONFIG, options(1))
    adafactor = OptimizerOptions(name="adafactor").optimizer(lambda step: RATE, 8)
    state = jax.eval_shape(functools.partial(init_state, learner, adafactor))
    layout = Layout.create(*MESH.values(), learner.shardings)
    report["adafactor_specs"] = specs(layout.state(state))
    heads = HeadsLearner(HeadsConfig(CONFIG.emb_dim, CONFIG.vocab_size, 2, 16), options(1), None)
    report["heads_specs"] = specs(heads.shardings(layout.mesh))

    # What was trained there is read anywhere.
    save_model(folder / "model", result.state.params, CONFIG, ByteVocabulary(), dtype="float32")
    read, written = load(folder / "model").params, jax.device_get(result.state.params)
    report["exported"] = all(
        jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), read, written))
    )

    params = Network(CONFIG, options(1)).init(jax.random.key(7))
    target = T5Model.create(params, CONFIG)
    kept, config = keep_layers(target.params, CONFIG, encoder=(0,), decoder=(0,))
    student = Student(config=config, params=own_params(kept), shared_layers=(0,))
    student = student.narrowed(target.params, np.arange(1, 33))

    def distilled(directory, **layout):
        learner = DraftLearner(
            student=student,
            target=target,
            distillation=DistillOptions(),
            options=options(3, objective="reverse_kl", distillation_weight=1.0, **layout),
        )
        result = fit(
            learner,
            # AdamW's first step is the gradient's sign, and of what the draft cannot change
            # (gradients that are 0 but for rounding) a sign is noise.
            optax.sgd(0.3, momentum=0.9),
            lambda step: RATE,
            make_batches(4),
            {0.0: make_batches(4)},
            directory,
            initial_params=student.params,
        )
        assert np.isfinite(result.best.dev[0].alpha.value)
        return result

    runs = {}
    for name, devices in (("alone", ALONE), ("mesh", MESH)):
        runs[name] = distilled(folder / "distill" / name, **devices)
    report["distill"] = {name: losses(folder / "distill" / name) for name in runs}
    report["distill_specs"] = specs(runs["mesh"].state.params)
    return report


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        # Some programs are compiled twice.
        jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        print(json.dumps(main(Path(folder))))
