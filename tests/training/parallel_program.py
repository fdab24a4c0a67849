"""Run by ``test_layout.py`` with 4 simulated devices: trains on one of them and on meshes,
and prints what is to be compared as JSON."""

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
from spec_t5x.training.distill import DistillOptions, DraftLearner, Student, distill
from spec_t5x.training.learners import HeadsLearner, Network
from spec_t5x.training.optimizers import make_optimizer
from spec_t5x.training.text_metrics import MetricsOptions, TextMetrics
from spec_t5x.training.trainer import TrainOptions, fit
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


class Texts:
    """An evaluator that scores nothing and keeps the texts, by the file that it writes."""

    def __init__(self, directory: Path):
        self.file = directory / "texts.json"

    def evaluate(self, step, write):
        sources = [[*range(2 + first, 8), 1] for first in range(5)]
        self.file.write_text(json.dumps(write(sources)))
        return {}


def train(directory: Path, steps: int, optimizer="adamw", rows=4, texts=False, **more):
    """5 rows do not divide by two; nor by two devices and two parts."""
    scorer = TextMetrics(
        Texts(directory),
        CONFIG,
        ByteVocabulary(),
        MetricsOptions(batch_size=5),
        longest=(8, 8),
        export_dtype="float32",
    )
    return fit(
        Network(CONFIG, options(steps, **more)),
        make_optimizer(optimizer, lambda step: RATE, min_dim_size_to_factor=8),
        lambda step: RATE,
        make_batches(rows),
        make_batches(rows),
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
        axes = list(leaf.sharding.spec)
        while axes and axes[-1] is None:
            axes.pop()
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = axes
    return found


def compare(folder: Path, run) -> dict:
    """The curves of ``run(directory, **options)`` on one device and on the mesh."""
    results = {}
    for name, layout in (("alone", ALONE), ("mesh", MESH)):
        results[name] = run(folder / name, **layout)
    return {"alone": losses(folder / "alone"), "mesh": losses(folder / "mesh")}, results["mesh"]


def main(folder: Path) -> dict:
    report = {}
    report["adamw"], result = compare(
        folder / "adamw", lambda d, **o: train(d, 4, rows=5, texts=True, **o)
    )
    report["adamw_specs"] = specs(result.state)
    report["dev"] = [losses(folder / "adamw" / name, "dev_loss") for name in ("alone", "mesh")]
    report["texts"] = [
        json.loads((folder / "adamw" / name / "texts.json").read_text())
        for name in ("alone", "mesh")
    ]
    report["adafactor"], result = compare(
        folder / "adafactor", lambda d, **o: train(d, 4, "adafactor", accumulation_steps=2, **o)
    )
    report["adafactor_specs"] = specs(result.state)

    # Begun on another mesh, and gone on with on one device.
    moved = folder / "moved"
    begun = train(moved, 3, rows=5, data_parallel=1, model_parallel=4)
    report["moved_specs"] = specs(begun.state.params)
    train(moved, 4, rows=5, **ALONE)
    report["moved"] = {"alone": report["adamw"]["alone"], "mesh": losses(moved)}

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
        result = distill(
            learner,
            # AdamW's first step is the gradient's sign, and of what the draft cannot change
            # (gradients that are 0 but for rounding) a sign is noise.
            optax.sgd(0.3, momentum=0.9),
            lambda step: RATE,
            make_batches(4),
            {0.0: make_batches(4)},
            directory,
        )
        assert np.isfinite(result.best.dev[0].alpha.value)
        return result

    report["distill"], result = compare(folder / "distill", distilled)
    report["distill_specs"] = specs(result.state.params)

    def heads(directory, **layout):
        config = HeadsConfig(CONFIG.emb_dim, CONFIG.vocab_size, 2, 16)
        return fit(
            HeadsLearner(config, options(3, **layout), target),
            make_optimizer("adamw", lambda step: RATE),
            lambda step: RATE,
            make_batches(4),
            make_batches(4),
            directory,
        )

    report["heads"], result = compare(folder / "heads", heads)
    report["heads_specs"] = specs(result.state.params)
    return report


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        # Some programs are compiled twice.
        jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        print(json.dumps(main(Path(folder))))
