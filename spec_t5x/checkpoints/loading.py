"""Reading a checkpoint of any supported format, and comparing two of them."""

import os
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.huggingface import gpt2
from spec_t5x.checkpoints.huggingface import reading as huggingface
from spec_t5x.checkpoints.own import native
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, read_json, recover
from spec_t5x.checkpoints.storage.loaded_model import LoadedModel
from spec_t5x.checkpoints.storage.locations import LOG_IN, GcsPath, Location, locate
from spec_t5x.checkpoints.storage.stored_model import Shardings, StoredModel
from spec_t5x.checkpoints.storage.vocabularies import (
    VocabularyLike,
    choose_vocabulary,
    make_vocabulary,
)
from spec_t5x.checkpoints.t5x.index import find_t5x
from spec_t5x.checkpoints.t5x.reading import open_t5x
from spec_t5x.data.mapped_vocabulary import has_tokenizer
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary, Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config

# Models that ship with the package, by name.
PACKAGED_MODELS = Path(__file__).parents[1] / "pretrained"

_GIVE = "give a spec_t5x, Hugging Face or T5X checkpoint"


def load(
    directory_or_name: str | Path | GcsPath,
    *,
    dtype: str = "float32",
    on_host: bool = False,
    vocabulary: VocabularyLike | None = None,
    shardings: Shardings | None = None,
    config: T5Config | None = None,
) -> LoadedModel:
    """Reads a model: the project's own format, Hugging Face's or T5X's, told by looking.

    Args:
        directory_or_name: a directory, or the name of a model that ships with the
            package; a directory of that name comes first. T5X's may be the checkpoint's
            (``…/checkpoint_1000000``) or the model's, of which the latest is taken, and
            may lie in a bucket (``gs://…``).
        dtype: "float32" or "bfloat16", of the parameters and of ``config.dtype``.
        on_host: leave the parameters in host memory as numpy arrays; else they go to
            JAX's default device.
        vocabulary: of a checkpoint without one, as T5X's are (see ``vocabularies``): a
            SentencePiece file, ``FILE:100`` with that many extra ids, "bytes", or another
            model that has it. One that disagrees with the checkpoint's own is refused.
        shardings: from the configuration to a tree of shardings like the parameters, such
            as ``models.partitioning.param_shardings`` with a mesh bound. Then only the
            slices that devices of this process hold are read, each of them once.
        config: the network of a T5X checkpoint, told from its shapes when left out.

    Raises:
        InputError: there is no such directory, or nothing in it that can be read.
    """
    stored = open_model(directory_or_name, vocabulary=vocabulary, config=config)
    return stored.load(dtype=dtype, on_host=on_host, shardings=shardings)


def open_model(
    directory_or_name: str | Path | GcsPath,
    *,
    vocabulary: VocabularyLike | None = None,
    config: T5Config | None = None,
) -> StoredModel:
    """Opens what ``load`` loads; the weights are read later.

    Raises:
        InputError: as ``load``, for all but the weights themselves.
    """
    directory = _find(directory_or_name)
    vocabulary = _of_another_model(vocabulary)
    values = _read_config(directory)
    if values is None:
        return open_t5x(directory, vocabulary=vocabulary, config=config)
    if config is not None:
        raise InputError(f"{directory} has a {CONFIG_NAME} of its own: leave config out")
    if _is_native(values, directory):
        stored = native.open_native(directory)
        num_rows = stored.config.vocab_size
        choose_vocabulary(vocabulary, stored.known_vocabulary(), directory, num_rows)
        return stored
    if values["model_type"] == gpt2.MODEL_TYPE:
        return _open_gpt2(values, directory, vocabulary)
    return huggingface.open_huggingface(directory, vocabulary=vocabulary)


def load_vocabulary(directory_or_name: str | Path | GcsPath) -> Vocabulary:
    """Reads the vocabulary of a model without its weights.

    Raises:
        InputError: as ``load``, for what concerns the vocabulary.
    """
    directory = _find(directory_or_name)
    values = _read_config(directory)
    if values is None:
        return open_t5x(directory).known_vocabulary()
    if _is_native(values, directory):
        return native.read_vocabulary(values, directory)
    if values["model_type"] == gpt2.MODEL_TYPE:
        return gpt2.read_vocabulary(values, directory)
    return huggingface.read_vocabulary(values, directory)


def has_vocabulary(directory_or_name: str | Path | GcsPath) -> bool:
    """Whether a model says what its ids mean; T5X's checkpoints do not.

    Raises:
        InputError: there is no such model.
    """
    directory = _find(directory_or_name)
    values = _read_config(directory)
    if values is None:
        return open_t5x(directory).vocabulary is not None
    if _is_native(values, directory):
        return True
    if values["model_type"] == gpt2.MODEL_TYPE:
        return has_tokenizer(directory)
    return huggingface.has_vocabulary(directory)


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """A draft's ids must mean what the target's mean.

    Raises:
        InputError: the vocabularies differ (named with the first id that does), or
            the models embed different numbers of ids.
    """
    if target.vocabulary.fingerprint() != draft.vocabulary.fingerprint():
        raise InputError(
            f"target {target.directory} and draft {draft.directory} have different "
            f"vocabularies ({_first_difference(target.vocabulary, draft.vocabulary)}): "
            "give a draft trained with the target's vocabulary"
        )
    if target.config.vocab_size != draft.config.vocab_size:
        raise InputError(
            f"target {target.directory} embeds {target.config.vocab_size} ids and "
            f"draft {draft.directory} {draft.config.vocab_size}: give models padded "
            "to one size"
        )


def find_directory(directory_or_name: str | Path) -> Path:
    """The directory of that path, or the packaged one of that name.

    Raises:
        InputError: there is neither.
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
    packaged = f", or one of the packaged {', '.join(names)}" if names else ""
    raise InputError(f"no directory {directory}: give the path of a checkpoint{packaged}")


def _find(directory_or_name: str | Path | GcsPath) -> Location:
    """As ``find_directory``; a place in a bucket, too."""
    location = locate(directory_or_name)
    return location if isinstance(location, GcsPath) else find_directory(location)


def _open_gpt2(
    values: dict[str, Any], directory: Path, given: VocabularyLike | None
) -> StoredModel:
    """A GPT-2 with its own tokenizer, or without one, with the given vocabulary."""
    if given is not None and not has_tokenizer(directory):
        return gpt2.open_gpt2(
            directory, vocabulary=make_vocabulary(given, values.get("vocab_size", 0))
        )
    stored = gpt2.open_gpt2(directory)
    choose_vocabulary(given, stored.known_vocabulary(), directory, stored.config.vocab_size)
    return stored


def _of_another_model(vocabulary: VocabularyLike | None) -> VocabularyLike | None:
    """A vocabulary given by a model's directory or packaged name, read from there."""
    if isinstance(vocabulary, str | Path):
        name = Path(vocabulary).expanduser()
        if name.is_dir() or (str(vocabulary) in packaged_names() and not name.exists()):
            return load_vocabulary(vocabulary)
    return vocabulary


def _read_config(directory: Location) -> dict[str, Any] | None:
    """The directory's config.json; None for a T5X checkpoint, which has none."""
    path = directory / CONFIG_NAME
    if path.is_file():
        if isinstance(directory, GcsPath):
            raise InputError(
                f"{directory} holds a {CONFIG_NAME}: copy it to this machine; from a bucket T5X "
                "checkpoints are read"
            )
        return read_json(path)
    if find_t5x(directory) is None:
        in_bucket = isinstance(directory, GcsPath)
        remedy = f"check the name and the credentials ({LOG_IN})" if in_bucket else _GIVE
        raise InputError(f"{directory} holds no {CONFIG_NAME} and no T5X checkpoint: {remedy}")
    return None


def _is_native(values: dict[str, Any], directory: Path) -> bool:
    """Whether a model is of the project's own format; else it is Hugging Face's."""
    if values.get("format") == native.FORMAT:
        return True
    if "model_type" in values:
        return False
    raise InputError(
        f"{directory / CONFIG_NAME} has neither format {native.FORMAT!r} nor a model_type: {_GIVE}"
    )


def packaged_names() -> list[str]:
    """Names of the models that ship with the package."""
    if not PACKAGED_MODELS.is_dir():
        return []
    return sorted(
        name
        for name in os.listdir(PACKAGED_MODELS)
        if (PACKAGED_MODELS / name / CONFIG_NAME).is_file()
    )


def _first_difference(target: Vocabulary, draft: Vocabulary) -> str:
    if type(target) is not type(draft):
        return f"{type(target).__name__} and {type(draft).__name__}"
    if not isinstance(target, ByteVocabulary):
        pairs = zip(_pieces(target), _pieces(draft), strict=False)
        for index, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                return f"id {index} is {ours!r} and {theirs!r}"
    return f"{target.vocab_size} and {draft.vocab_size} ids"


def _pieces(vocabulary: Vocabulary) -> list[str]:
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return [vocabulary.piece(index) for index in range(vocabulary.vocab_size)]
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary.path))
    count = processor.get_piece_size()
    pieces = [processor.id_to_piece(index) for index in range(count)]
    return pieces + [f"<extra_id_{i}>" for i in reversed(range(vocabulary.extra_ids))]
