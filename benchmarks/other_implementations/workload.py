"""Workload of every implementation: a target, its draft and the token ids to decode."""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.huggingface.t5 import EOS, PAD, START, config_values
from spec_t5x.checkpoints.loading import open_model
from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS
from spec_t5x.errors import InputError
from spec_t5x.generation.generator import DEFAULT_MAX_SOURCE_LENGTH
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID

# Name of a draft with random weights, used beside the names of ``make_draft``.
RANDOM = "random"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Models, inputs and limits of a comparison, as values that JSON can pass to processes."""

    title: str
    # Target as ``checkpoints.loading.load`` takes it, and its copy in Hugging Face's format.
    target: str
    target_copy: str
    vocabulary: str | None = None
    # Copy of the draft in that format; None without a draft, or if it is no T5.
    draft_copy: str | None = None
    # With random weights, probability that a token of each draft is accepted; else None.
    alphas: tuple[float, ...] | None = None
    # Token ids of every source, end of sequence included.
    inputs: list[list[int]]
    max_source_len: int
    max_decode_len: int
    threads: int


def of_pair(
    target: str, draft: str, texts: Sequence[str], scratch: Path, **settings: int
) -> tuple[Workload, T5Config]:
    """Returns a workload of the texts that are neither empty nor too long, and the target's sizes.

    Raises:
      InputError: the target cannot be read or is not a T5, or no text fits.
    """
    stored = open_model(target)
    if not isinstance(stored.config, T5Config):
        raise InputError(f"target {target} is not a T5: give a T5's checkpoint")
    limit = stored.metadata.get("max_source_length", DEFAULT_MAX_SOURCE_LENGTH)
    encode = stored.known_vocabulary().encode
    inputs = [ids for text in texts if 1 < len(ids := [*encode(text), EOS_ID]) <= limit]
    if not inputs:
        raise InputError(f"no input has 1 to {limit - 1} tokens: give other texts")
    convert(target, scratch / "target", to="huggingface", dtype="float32")
    network = _network_of(draft, target)
    if network:
        convert(network, scratch / "draft", to="huggingface", dtype="float32")
    workload = Workload(
        title=" with ".join(Path(name).name for name in (target, network) if name),
        target=target,
        target_copy=str(scratch / "target"),
        draft_copy=str(scratch / "draft") if network else None,
        inputs=inputs,
        max_source_len=limit,
        **settings,
    )
    return workload, stored.config


def of_sizes(
    names: Sequence[str], draft: str, source_len: int, scratch: Path, **settings
) -> Iterator[tuple[Workload, T5Config]]:
    """Yields a workload and sizes per published size; the next step deletes its random weights.

    Raises:
      InputError: a size is unknown, or its vocabulary size is not the draft's.
    """
    for name in names:
        if size(name).vocab_size != size(draft).vocab_size:
            raise InputError(f"{name} and its draft {draft} have different vocabularies")
    write_random_weights(scratch / "draft", draft, seed=1)
    for name in names:
        write_random_weights(scratch / name, name, seed=0)
        ids = np.random.default_rng(0).integers(3, size(name).vocab_size, source_len - 1)
        workload = Workload(
            title=name,
            target=str(scratch / name),
            target_copy=str(scratch / name),
            vocabulary="bytes",
            # A draft as large as the target gains nothing.
            draft_copy=None if name == draft else str(scratch / "draft"),
            inputs=[[*ids.tolist(), EOS_ID]],
            max_source_len=source_len,
            **settings,
        )
        yield workload, size(name)
        for path in scratch.glob(f"{name}*"):
            shutil.rmtree(path)


def write_random_weights(directory: Path, name: str, *, seed: int) -> None:
    """Writes a T5 of a published size with transformers' initial weights, in float32.

    Output weights of end of sequence and padding are 0, so their logits are far below the largest,
    and every implementation decodes as many tokens as it may.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(f"{error}: install transformers and torch for --size") from error
    torch.manual_seed(seed)
    values = config_values(size(name), "float32", "t5")
    values |= {START: PAD_ID, EOS: EOS_ID, PAD: PAD_ID}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**values))
    with torch.no_grad():
        model.get_output_embeddings().weight[[PAD_ID, EOS_ID]] = 0
    model.save_pretrained(directory)


def _network_of(draft: str, target: str) -> str | None:
    """Returns the name of the T5 checkpoint that ``draft`` refers to; None if it is not a T5."""
    name = draft.removeprefix("transformer").removeprefix(":")
    name = name or PACKAGED_DRAFTS.get(target, {}).get("transformer", "")
    try:
        return name if isinstance(open_model(name).config, T5Config) else None
    except InputError:
        return None
