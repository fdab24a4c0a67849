"""transformers: greedy, with a dynamic or a static cache, and assisted generation."""

import functools
from typing import Any

import torch
import transformers

from spec_t5x.experiments.neighbours.interface import Job, until_end


class Decoder:
    """``generate`` of a model, with these arguments."""

    def __init__(self, model: Any, arguments: dict[str, Any]):
        self._model = model
        self._arguments = arguments

    @torch.inference_mode()
    def decode(self, ids: list[int], max_tokens: int) -> list[int]:
        """See ``interface.Decoder``."""
        source = torch.tensor([ids])
        outputs = self._model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
            **self._arguments,
        )
        # The start token comes first.
        return until_end(outputs[0, 1:].tolist())

    @torch.inference_mode()
    def encode(self, ids: list[int]) -> bool:
        """The encoder alone."""
        source = torch.tensor([ids])
        self._model.get_encoder()(input_ids=source, attention_mask=torch.ones_like(source))
        return True


def version() -> str:
    """Its own and PyTorch's."""
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def make(job: Job, *, cache: str | None = None, assistant: str | None = None, gamma: int = 0):
    """Greedy generation.

    Args:
      job: the copies of the weights.
      cache: "static"; None is what T5 has by itself.
      assistant: "gamma" has the draft propose ``gamma`` tokens every time, "own" as many as
        its own settings say; None has no assistant.
      gamma: see there.
    """
    torch.set_num_threads(job.threads)
    arguments = {}
    if cache is not None:
        arguments["cache_implementation"] = cache
    if assistant is not None:
        arguments["assistant_model"] = _assistant(job.draft_copy, assistant, gamma)
    return Decoder(_model(job.target_copy), arguments)


def _read(directory: str) -> Any:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    # It makes the decoder's cache for as many layers as the encoder has, and fails where the
    # decoder has more. The networks are built, and caches are all that still look here.
    model.config.num_layers = model.config.num_decoder_layers
    return model.eval()


_model = functools.cache(_read)


def _assistant(directory: str, kind: str, gamma: int) -> Any:
    """The draft. Settings are the model's there, so that each kind has a model of its own."""
    model = _read(directory)
    if kind == "gamma":
        model.generation_config.num_assistant_tokens = gamma
        model.generation_config.num_assistant_tokens_schedule = "constant"
        # Else it stops where it is not sure.
        model.generation_config.assistant_confidence_threshold = 0.0
    return model
