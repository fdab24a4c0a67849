"""Launches of T5X's programs, from gin files to output files, with two checkpoints."""

import functools
import json
import sys
from pathlib import Path

import flax.core
import jax
import jax.numpy as jnp
from t5x import adafactor, checkpoints, partitioning, train_state

from spec_t5x.checkpoints.loading import load
from tests.child import meeting_point, together
from tests.t5x_plugin.toy_models import REPOSITORY, environment, t5x_network

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
# A model file with the draft's sizes, for training.
SMALL_MODEL_GIN = """
include "{directory}/model_0.0.gin"
models.EncoderDecoderModel.z_loss = 0.0001
network.T5Config:
  emb_dim = 16
  num_encoder_layers = 1
  num_decoder_layers = 1
  dropout_rate = %DROPOUT_RATE
"""

INFER = "gin_configs/runs/t5x_infer.gin"
BY_NAME = "gin_configs/t5x/draft_by_name.gin"
STOCK_INFER = "t5x/configs/runs/infer.gin"
WITH_SCORES = {"infer.mode": "predict_with_aux"}
# Macros of a short training.
TRAINING = {"BATCH_SIZE": 4, "EVAL_STEPS": 1, "EVAL_PERIOD": 2, "CHECKPOINT_PERIOD": 2}
# Macros that split each model over two devices.
MODEL_PARALLEL = {
    "partitioning.PjitPartitioner.num_partitions": None,
    "partitioning.PjitPartitioner.model_parallel_submesh": (1, 1, 1, 2),
}
# Runs a module as one of several processes that share their devices, as the hosts of a TPU pod do.
ONE_OF_SEVERAL = """
import runpy, sys
import jax
address, number, index, module, *arguments = sys.argv[1:]
jax.distributed.initialize(address, int(number), int(index))
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class Launches:
    """Folder with checkpoints that T5X wrote, in which T5X's programs are launched."""

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
        self.stock = functools.cache(self._stock)

    def _save(self, name: str, loaded) -> None:
        """Saves a checkpoint in each of T5X's formats, with an optimizer's state."""
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

    def checkpoint(self, name: str) -> str:
        """Returns the path of a checkpoint by its name, for example ``target_legacy``."""
        return str(self.directory / name / "checkpoint_7")

    def command(self, program: str, files: list[str], *, devices: int = 1, **macros):
        """Returns arguments and options of ``subprocess`` to launch a program on the toy task."""
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

    def train(self, files: list[str], *, processes: int = 1, **macros) -> str:
        """Runs ``t5x.train``; returns its standard error."""
        return finished(*self.command("train", files, **macros), processes=processes)

    def output(self, program: str, files: list[str], *, processes: int = 1, **macros) -> Path:
        """Runs ``infer`` or ``eval``; returns the output directory, sets ``log`` to the errors."""
        output = self.directory / f"out_{len(list(self.directory.glob('out_*')))}"
        macros |= {
            f"{program.upper()}_OUTPUT_DIR": str(output),
            "utils.DatasetConfig.batch_size": 8,
        }
        self.log = finished(*self.command(program, files, **macros), processes=processes)
        return output

    def infer(self, files: list[str], *, target: str = "target_legacy", **macros) -> list[dict]:
        """Runs ``t5x.infer`` with the checkpoint named ``target``; returns the predictions."""
        macros["CHECKPOINT_PATH"] = self.checkpoint(target)
        return predictions(self.output("infer", files, **macros))

    def _stock(self, temperature: float) -> list[dict]:
        """Returns the predictions of T5X's own decoding at temperature 0.0 or 1.0."""
        return self.infer([f"model_{temperature}.gin", STOCK_INFER], **WITH_SCORES)


def finished(arguments: list[str], options: dict, *, processes: int = 1) -> str:
    """Runs a command that must exit with 0; returns its standard error.

    Several ``processes`` run its module together; the result is the first one's.
    """
    commands = [arguments]
    with meeting_point() as address:
        if processes > 1:
            python, _, *module = arguments
            start, number = [python, "-c", ONE_OF_SEVERAL, address], str(processes)
            commands = [[*start, number, str(index), *module] for index in range(processes)]
        return together(commands, **options)[0][1]


def predictions(output: Path) -> list[dict]:
    """Returns the predictions that ``infer`` wrote to the directory ``output``."""
    (file,) = output.glob("launch-*.jsonl-00000-of-00001")
    return [json.loads(line) for line in file.read_text().splitlines()]
