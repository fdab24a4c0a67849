"""Text in, text out: tokenizing, batching and decoding with a target and a draft.

Shapes are taken from a short list, so that few programs are compiled: sources and prompts are
padded to a bucket, batches to ``batch_size``.

For an encoder-decoder, a text is the source. For a decoder-only model, it is the prompt, which may
be empty; the output is the continuation, without the prompt.
"""

from spec_t5x.generation.answers import Answer, Generation
from spec_t5x.generation.batches import Batch
from spec_t5x.generation.generator import Generator
from spec_t5x.generation.streaming import StreamEvent
from spec_t5x.options import GenerateOptions

__all__ = [
    "Answer",
    "Batch",
    "GenerateOptions",
    "Generation",
    "Generator",
    "StreamEvent",
]
