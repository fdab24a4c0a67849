"""Reading a checkpoint of any supported format, and comparing two of them."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.formats import NATIVE, Format, format_of
from spec_t5x.checkpoints.huggingface import generation_config, hub
from spec_t5x.checkpoints.packaged import PACKAGED_MODELS, packaged_names
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_json, recover
from spec_t5x.checkpoints.storage.locations import GcsPath, Location, locate
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, Shardings, StoredModel
from spec_t5x.checkpoints.storage.vocabularies import (
    VocabularyLike,
    choose_vocabulary,
    make_vocabulary,
)
from spec_t5x.data.mapped_vocabulary import MappedVocabulary
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.machine.progress import doing

log = logging.getLogger(__name__)


def load(
    directory_or_name: str | Path | GcsPath,
    *,
    dtype: str = "float32",
    vocabulary: VocabularyLike | None = None,
    shardings: Shardings | None = None,
    for_decoding: bool = False,
) -> LoadedModel:
    """Reads a model of any of the ``formats``, recognized by its files.

    Args:
        directory_or_name: a directory, or the name of a packaged model or of one on the Hugging
            Face Hub (``huggingface.hub``); a directory of that name comes first. A T5X checkpoint
            (``…/checkpoint_1000000``), or a model's directory with its latest, may be in a bucket
            (``gs://…``).
        dtype: "float32" or "bfloat16", of the parameters and of ``config.dtype``.
        vocabulary: for a checkpoint without one, as T5X's are (see ``vocabularies``): a
            SentencePiece file, ``FILE:100`` with that many extra ids, "bytes", or another
            model that has it. One that disagrees with the checkpoint's is refused.
        shardings: from the configuration to a tree of shardings like the parameters, such
            as ``models.partitioning.param_shardings`` with a mesh bound. Then only the
            slices that devices of this process hold are read, each of them once. Without it
            the parameters are on JAX's default device.
        for_decoding: gives parameters as ``LoadedModel.bind`` has them; where this machine's
            operations pack them, those in float32 are never all in memory.

    Raises:
        InputError: there is no such directory or repository, or nothing in it can be read.
    """
    stored = open_model(directory_or_name, vocabulary=vocabulary)
    with doing(log, f"loading {stored.directory}"):
        return stored.load(dtype=dtype, shardings=shardings, for_decoding=for_decoding)


def open_model(
    directory_or_name: str | Path | GcsPath, *, vocabulary: VocabularyLike | None = None
) -> StoredModel:
    """Opens the model that ``load`` loads; the weights are read later."""
    directory, values, format = _recognized(find(directory_or_name))
    if is_on_hub(directory_or_name):
        hub.download_weights(directory_or_name)
    stored = format.open_model(directory, values)
    metadata = stored.metadata
    if values is not None and "format" not in values:
        settings = generation_config.read(directory, values)
        metadata = {**metadata, generation_config.GENERATION: settings} if settings else metadata
    given, rows = _of_another_model(vocabulary), stored.config.vocab_size
    chosen = choose_vocabulary(given, stored.vocabulary, stored.directory, rows)
    return dataclasses.replace(stored, vocabulary=chosen, metadata=metadata)


def load_vocabulary(directory_or_name: str | Path | GcsPath) -> Vocabulary:
    """Reads the vocabulary of a model; the weights of a T5 on the Hub are not downloaded."""
    if is_on_hub(directory_or_name):
        directory, values, format = _recognized(find(directory_or_name))
        vocabulary = format.read_vocabulary and format.read_vocabulary(directory, values)
        if vocabulary is not None:
            return vocabulary
    return open_model(directory_or_name).known_vocabulary()


def named_vocabulary(vocabulary: VocabularyLike, num_rows: int | None = None) -> Vocabulary:
    """Makes the ``vocabulary`` of ``load``; ``num_rows`` as in ``make_vocabulary``."""
    return make_vocabulary(_of_another_model(vocabulary), num_rows)


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel | StoredModel) -> None:
    """Refuses a draft whose ids differ in meaning from the target's, with the first that does."""
    if not _same_ids(target.vocabulary, draft.vocabulary):
        raise InputError(
            f"target {target.directory} and draft {draft.directory} have different "
            f"vocabularies ({_first_difference(target.vocabulary, draft.vocabulary)}): "
            "give a draft trained with the target's vocabulary"
        )


def _same_ids(target: Vocabulary, draft: Vocabulary) -> bool:
    """Tells whether each of the draft's ids is the target's, which may have more tokens."""
    if target.fingerprint() == draft.fingerprint():
        return True
    if isinstance(target, MappedVocabulary) and isinstance(draft, MappedVocabulary):
        # Their models may be padded to different sizes.
        return target.named_pieces() == draft.named_pieces()
    if not (isinstance(target, UnigramVocabulary) and target.has_added):
        return False
    # The model that tokens were added to drafts none of them.
    ids = range(draft.vocab_size)
    return len(ids) <= target.vocab_size and all(target.piece(i) == draft.piece(i) for i in ids)


def _first_difference(target: Vocabulary, draft: Vocabulary) -> str:
    if type(target) is not type(draft):
        return f"{type(target).__name__} and {type(draft).__name__}"
    for index in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.piece(index), draft.piece(index)
        if ours != theirs:
            return f"id {index} is {ours!r} and {theirs!r}"
    return f"{target.vocab_size} and {draft.vocab_size} ids"


def find(directory_or_name: str | Path | GcsPath) -> Location:
    """Finds a model here or in a bucket; see ``find_directory``."""
    location = locate(directory_or_name)
    return location if isinstance(location, GcsPath) else find_directory(directory_or_name)


def find_directory(directory_or_name: str | Path) -> Path:
    """Finds the directory of a path, of a packaged model, or of a name in the Hub's cache.

    All files but the weights of a name on the Hub are downloaded.

    Raises:
        InputError: there is none, or the model on the Hub is none that is read.
    """
    directory = Path(directory_or_name).expanduser()
    recover(directory)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise InputError(f"{directory} is a file: give the directory that holds it")
    names = packaged_names()
    if str(directory_or_name) in names:
        return PACKAGED_MODELS / str(directory_or_name)
    if is_on_hub(directory_or_name):
        return _checked(directory_or_name, hub.snapshot(directory_or_name))
    packaged = f", or one of the packaged {', '.join(names)}" if names else ""
    raise InputError(
        f"no directory {directory}: give the path of a checkpoint, OWNER/NAME of one on the "
        f"Hugging Face Hub{packaged}"
    )


def is_on_hub(directory_or_name: str | Path | GcsPath) -> bool:
    """Tells whether a name is a text ``OWNER/NAME``, with nothing of that path on this machine."""
    if not isinstance(directory_or_name, str) or not hub.is_name(directory_or_name):
        return False
    recover(Path(directory_or_name))
    return not Path(directory_or_name).exists()


def _checked(name: str, directory: Path) -> Path:
    """Returns the directory of a model on the Hub, unless its configuration is not read."""
    try:
        _, values, format = _recognized(directory)
        if format.check_supported is not None:
            format.check_supported(values, directory)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if format is NATIVE:
        raise InputError(
            f"{name} is a checkpoint of spec_t5x: run `{hub.command(name)} --local-dir DIR` and "
            "give DIR"
        )
    return directory


def _recognized(directory: Location) -> tuple[Location, dict[str, Any] | None, Format]:
    """Returns a directory with its config.json, if it has one, and its format."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        return directory, None, format_of(directory, None)
    if isinstance(directory, GcsPath):
        raise InputError(
            f"{directory} holds a {CONFIG_NAME}: copy it to this machine; from a bucket T5X "
            "checkpoints are read"
        )
    values = read_json(path)
    return directory, values, format_of(directory, values)


def _of_another_model(vocabulary: VocabularyLike | None) -> VocabularyLike | None:
    """Reads a vocabulary that is given by a model's directory or name; returns others as given."""
    if isinstance(vocabulary, str | Path):
        name = Path(vocabulary).expanduser()
        # A name that ends as files do is a missing file.
        on_hub = is_on_hub(vocabulary) and name.suffix not in (".model", ".json")
        packaged = str(vocabulary) in packaged_names() and not name.exists()
        if name.is_dir() or packaged or on_hub:
            return load_vocabulary(vocabulary)
    return vocabulary
