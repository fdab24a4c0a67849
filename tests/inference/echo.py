"""A pair that answers at once, and runs of it."""

import dataclasses
import functools
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
    """Answers each text with itself and the widths of the batch that it was in."""

    def __init__(self):
        # No model: nothing of the parent's is called but what is overridden here.
        object.__setattr__(self, "max_source_len", 32)
        object.__setattr__(self, "target", None)
        object.__setattr__(self, "draft", None)
        object.__setattr__(self, "defaults", {})
        object.__setattr__(self, "_costs", {})

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
    """What ``Echo`` answers."""

    def submit(self, places, batch):
        answers = self.decoder.collect(batch, batch, self.options)
        self.under_way.append(functools.partial(self._counted, places, answers))

    def costs(self, batch):
        return self.decoder.costs(batch, self.options)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs in ``directory``; each call is a process that starts."""

    directory: Path
    source: Path

    @property
    def output(self) -> Path:
        return self.directory / "out"

    def __call__(self, decoding=OPTIONS, settings=None, load=Echo, hosts=None, **options):
        options = {"output_dir": str(self.output), "shard_size": 3} | options
        options = InferOptions(input=str(self.source), **options)
        source = file_source(options.input, options.field)
        settings = settings or {"target": "echo"}
        return infer(options, decoding, source, lambda *_: load(), settings=settings, hosts=hosts)

    def files(self) -> dict[str, bytes]:
        """What a run leaves for its user."""
        return {path.name: path.read_bytes() for path in sorted(self.output.glob("[!.]*"))}

    def inodes(self) -> dict[str, tuple]:
        """Which of a user's files were written anew since."""
        paths = sorted(self.output.glob("predictions-*"))
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in paths}

    def left_over(self) -> list[str]:
        """Files that a finished run should not leave."""
        return [path.name for path in self.output.glob(".*") if "lock" not in path.name]

    def elsewhere(self, name: str) -> "Runner":
        """The same inputs, another directory."""
        (self.directory / name).mkdir()
        return dataclasses.replace(self, directory=self.directory / name)
