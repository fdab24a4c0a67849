"""Program of ``test_layout.py``: trains on one of 4 simulated devices and on meshes, and prints
the results as JSON, for comparison."""

import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

from spec_t5x.checkpoints.loading import load
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.labs.metrics import TextPairs
from spec_t5x.labs.training.distill import DistillOptions, DraftLearner
from spec_t5x.labs.training.exports import save_model
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.kept_layers import keep_layers
from spec_t5x.labs.training.learners import Network
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.student import Student
from spec_t5x.labs.training.text_metrics import MetricsOptions, TextMetrics
from spec_t5x.labs.training.trainer import fit
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from tests.labs.training.toys import copy_batches, toy_config

CONFIG = toy_config(384, 16, logits_via_embedding=False, dropout_rate=0.0)
RATE = 1e-2
ALONE, MESH = {"data_parallel": 1}, {"data_parallel": 2, "model_parallel": 2}
SOURCES = [[*range(2 + first, 8), 1] for first in range(5)]


def options(steps: int, **more) -> TrainOptions:
    return TrainOptions(steps=steps, log_period=1, checkpoint_period=3, **more)


def train(directory: Path, steps: int, **more):
    """Trains on batches of 5 rows, which neither devices nor accumulation steps divide."""
    texts = TextPairs(
        name="texts", pairs=[("", "")] * len(SOURCES), ids=SOURCES, metric=lambda *_: {}
    )
    batches = copy_batches(64, rows=5)
    scorer = TextMetrics(
        sets=[texts],
        directory=directory,
        config=CONFIG,
        vocabulary=ByteVocabulary(),
        options=MetricsOptions(period=3, batch_size=5),
        longest=(8, 8),
        export_dtype="float32",
    )
    return fit(
        Network(CONFIG, options(steps, eval_period=3, accumulation_steps=2, **more)),
        OptimizerOptions().optimizer(lambda step: RATE),
        lambda step: RATE,
        batches,
        batches,
        directory,
        scorer=scorer,
    )


def logged(file: Path, name: str) -> list:
    lines = map(json.loads, file.open())
    return [line[name] for line in lines if name in line]


def specs(tree) -> dict[str, list]:
    """Returns the mesh axes of each array's sharding, by path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = list(leaf.sharding.spec)
        while axes and axes[-1] is None:
            axes.pop()
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = axes
    return found


def main(folder: Path) -> dict:
    report = {}
    runs = [folder / "alone", folder / "mesh"]
    train(runs[0], 4, **ALONE)
    # The second run starts on a mesh and resumes on one device.
    result = train(runs[1], 3, **MESH)
    train(runs[1], 4, **ALONE)
    report["adamw"] = [logged(run / "metrics.jsonl", "loss") for run in runs]
    report["dev"] = [logged(run / "metrics.jsonl", "dev_loss") for run in runs]
    # Texts of step 3, because the second run took step 4 on one device.
    texts = [run / "predictions" / "texts-000003.jsonl" for run in runs]
    report["texts"] = [logged(file, "prediction") for file in texts]
    report["adamw_specs"] = specs(result.state)

    save_model(folder / "model", result.state.params, CONFIG, ByteVocabulary(), dtype="float32")
    read, written = load(folder / "model").params, jax.device_get(result.state.params)
    report["exported"] = all(
        jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), read, written))
    )

    target = T5Model.create(Network(CONFIG, options(1)).init(jax.random.key(7)), CONFIG)
    # New layers, since copies of the target's layers have nothing to learn.
    others = Network(CONFIG, options(1)).init(jax.random.key(8))
    kept, config = keep_layers(others, CONFIG, encoder=(0,), decoder=(0,))
    student = Student(config=config, params=own_params(kept), shared_layers=(0,))
    student = student.narrowed(target.params, np.arange(1, 33))
    batches = copy_batches(64)

    def distilled(directory, **layout):
        weights = {"objective": "reverse_kl", "distillation_weight": 1.0}
        learner = DraftLearner(
            student=student,
            target=target,
            distillation=DistillOptions(),
            options=options(2, eval_period=0, **weights, **layout),
        )
        # Not AdamW: its first step is the gradient's sign, which is noise for gradients that are
        # zero up to rounding.
        optimizer = optax.sgd(0.3, momentum=0.9)
        start = {"initial_params": student.params}
        rate = lambda step: RATE  # noqa: E731
        result = fit(learner, optimizer, rate, batches, {0.0: batches}, directory, **start)
        held_out = [each["loss"] for each in logged(directory / "metrics.jsonl", "held_out")]
        return logged(directory / "metrics.jsonl", "loss") + held_out, result.state.params

    runs = [distilled(folder / name, **each) for name, each in (("a", ALONE), ("m", MESH))]
    report["distill"] = [losses for losses, _ in runs]
    report["distill_specs"] = specs(runs[1][1])
    return report


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        # Caches programs, because some are compiled twice.
        jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        print(json.dumps(main(Path(folder))))
