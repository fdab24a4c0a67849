"""Stub of a generator that answers without decoding, and a runner of bulk inference with it."""

import dataclasses
import functools
import types
from pathlib import Path

from spec_t5x.errors import InputError
from spec_t5x.generation import Answer, GenerateOptions, Generation, Generator
from spec_t5x.generation.engine import Engine
from spec_t5x.inference.bulk import infer
from spec_t5x.inference.infer_options import InferOptions
from spec_t5x.inference.sources import file_source
from spec_t5x.types import EOS_ID

OPTIONS = GenerateOptions(batch_size=2, gamma=4)


class Echo(Generator):
    """Generator stub: each of two outputs is the text, the batch's width and an index."""

    def __init__(self):
        # Without a model, because no method that needs more than its number of ids is called.
        target = types.SimpleNamespace(vocab_size=1 << 20)
        fields = {"max_source_len": 32, "target": target, "draft": None, "defaults": {}}
        fields["_costs"] = {}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def tokenize(self, text, options):
        if len(text) >= self.max_source_len:
            raise InputError(f"the text has {len(text)} tokens: shorten it")
        return [*(3 + ord(character) % 100 for character in text), EOS_ID]

    def engine(self, options, pace=None):
        return Echoing(self, options, self._costs)

    def collect(self, batch, decoded, options):
        width = decoded.tokens.shape[1]
        for text in batch.texts:
            yield Answer(
                Generation(
                    input=text,
                    output=f"{text} {width} {decode}",
                    output_ids=[3] * width,
                    score=-0.5,
                    target_calls=4,
                    block_efficiency=2.0,
                )
                for decode in reversed(range(2))
            )


class Echoing(Engine):
    """Engine of ``Echo``, which answers in ``submit``."""

    def submit(self, places, batch):
        answers = self.decoder.collect(batch, batch, self.options)
        self.under_way.append(functools.partial(self._counted, places, answers))

    def costs(self, batch):
        return self.decoder.costs(batch, self.options)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runner of bulk inference on ``source`` in this process, with outputs in ``directory/out``."""

    directory: Path
    source: Path

    @property
    def output(self) -> Path:
        return self.directory / "out"

    def __call__(self, decoding=OPTIONS, settings=None, load=Echo, **options):
        options = {"output_dir": str(self.output), "shard_size": 3} | options
        options = InferOptions(input=str(self.source), **options)
        source = file_source(options.input, options.field)
        settings = settings or {"target": "echo"}
        return infer(options, decoding, source, lambda *_: load(), settings=settings)

    def files(self) -> dict[str, bytes]:
        """Returns the content of each visible output file, by name."""
        return {path.name: path.read_bytes() for path in sorted(self.output.glob("[!.]*"))}

    def inodes(self) -> dict[str, tuple]:
        """Returns inode and time of each file of answers, which change if the file is rewritten."""
        paths = sorted(self.output.glob("predictions-*"))
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in paths}

    def left_over(self) -> list[str]:
        """Returns the names of hidden files except locks; a finished run must leave none."""
        return [path.name for path in self.output.glob(".*") if "lock" not in path.name]

    def elsewhere(self, name: str) -> "Runner":
        """Returns a runner on the same source in the new subdirectory ``name``."""
        (self.directory / name).mkdir()
        return dataclasses.replace(self, directory=self.directory / name)
