"""This package: plain decoding, and speculative decoding with any draft."""

import dataclasses
import functools
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import jax
import numpy as np

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import DraftOptions, make_draft
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.experiments.neighbours.interface import Job
from spec_t5x.experiments.synthetic_acceptance import SyntheticVerifier
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.models.binding import Model, bind
from spec_t5x.types import PAD_ID


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DrawnVerdicts(GenerateOptions):
    """Verification is done, and its count then drawn: of random weights, time alone."""

    alpha: float

    def make_verifier(self) -> SyntheticVerifier:
        """Accepts each proposal with probability ``alpha``."""
        return SyntheticVerifier(alpha=self.alpha)


class Decoder:
    """A generator, ids in and ids out."""

    def __init__(self, generator: Generator, options: GenerateOptions):
        self._generator = generator
        self._options = options

    def decode(self, ids: list[int], max_tokens: int) -> list[int]:
        """See ``interface.Decoder``: one program, told at run time when to stop."""
        batch = self._batch(ids)
        steps = np.full_like(batch.max_decode_steps, max_tokens)
        batch = dataclasses.replace(batch, max_decode_steps=steps)
        decoded = jax.device_get(self._generator.decode(batch, self._options))
        return decoded.tokens[0, 0, : decoded.lengths[0, 0]].tolist()

    def encode(self, ids: list[int]) -> bool:
        """The encoder, the source's keys and values, and an empty cache."""
        room = self._options.max_decode_len + 1
        jax.block_until_ready(_encode(self._generator.target, self._batch(ids).tokens, room))
        return True

    def margin(self, ids: list[int], prefix: list[int], first: int, second: int) -> float:
        """The target's logit of one token after ``prefix``, minus that of another."""
        # At its full length, whatever the prefix: compiled once.
        tokens = np.full((1, self._options.max_decode_len), PAD_ID, np.int32)
        tokens[0, 1 : len(prefix) + 1] = prefix
        logits = _score(self._generator.target, self._batch(ids).tokens, tokens)
        return float(logits[0, len(prefix), first] - logits[0, len(prefix), second])

    def _batch(self, ids: list[int]) -> Batch:
        return self._generator.make_batch([""], [ids], [0], self._options)


def version() -> str:
    """The package's and JAX's."""
    try:
        own = version_of("spec_t5x")
    except PackageNotFoundError:
        own = "(a checkout)"
    return f"spec_t5x {own}, JAX {jax.__version__}"


def make(
    job: Job, *, draft: str | None = None, gamma: int = 0, verifier: str | None = None
) -> Decoder:
    """Plain decoding without a draft.

    Args:
      job: models, lengths, and whether verdicts are drawn.
      draft: what ``checkpoints.make_draft`` makes a draft of; "draft" is the job's own.
      gamma: drafts in an iteration.
      verifier: a name of ``verifiers``; None takes the default.

    Raises:
      InputError: a checkpoint or draft that cannot be read.
    """
    # With drawn verdicts all is random: the copies are the models.
    name = job.target_copy if job.alpha is not None else job.target
    loaded = _load(name, job.vocabulary)
    model = _bind(name, job.vocabulary)
    generator = Generator(
        target=model, vocabulary=loaded.vocabulary, max_source_len=job.max_source_len
    )
    values = {"max_decode_len": job.max_decode_len, "gamma": gamma}
    if verifier:
        values["verifier"] = verifier
    if draft is None:
        return Decoder(generator, GenerateOptions(**values))
    if job.alpha is not None:
        small = TransformerDraft(_bind(job.draft_copy, None))
        return Decoder(generator.with_draft(small), _DrawnVerdicts(alpha=job.alpha, **values))
    own = make_draft(
        job.draft if draft == "draft" else draft, loaded, model, DraftOptions(dtype="float32")
    )
    return Decoder(generator.with_draft(own), GenerateOptions(**values))


@functools.cache
def _load(name: str, vocabulary: str | None) -> LoadedModel:
    return load(name, dtype="float32", vocabulary=vocabulary)


@functools.cache
def _bind(name: str, vocabulary: str | None) -> Model:
    loaded = _load(name, vocabulary)
    return bind(loaded.params, loaded.config)


@jax.jit
def _score(target: Model, sources, tokens):
    """Logits after each of the tokens, of which the start token is the first."""
    logits, _ = target.score(target.prefill(sources, tokens.shape[1]), tokens)
    return logits


@functools.partial(jax.jit, static_argnums=2)
def _encode(target: Model, tokens, room: int):
    return target.prefill(tokens, room)
