"""Reading a checkpoint of any supported format, and comparing two of them."""

import os
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints import huggingface, native
from spec_t5x.checkpoints.files import CONFIG_NAME, read_json
from spec_t5x.checkpoints.loaded_model import LoadedModel
from spec_t5x.data.vocabulary import SentencePieceVocabulary, Vocabulary
from spec_t5x.errors import InputError

# Models that ship with the package, by name.
PACKAGED_MODELS = Path(__file__).parents[1] / "pretrained"


def load(
    directory_or_name: str | Path, *, dtype: str = "float32", on_host: bool = False
) -> LoadedModel:
    """Reads a model: the project's own format or Hugging Face's, told by looking.

    Args:
        directory_or_name: a directory, or the name of a model that ships with the
            package; a directory of that name comes first.
        dtype: "float32" or "bfloat16", of the parameters and of ``config.dtype``.
        on_host: leave the parameters in host memory as numpy arrays, for
            callers that shard them; else they go to JAX's default device.

    Raises:
        InputError: there is no such directory, or nothing in it that can be read.
    """
    directory = find_directory(directory_or_name)
    if _is_native(_read_config(directory), directory):
        return native.load_model(directory, dtype=dtype, on_host=on_host)
    return huggingface.load_huggingface(directory, dtype=dtype, on_host=on_host)


def load_vocabulary(directory_or_name: str | Path) -> Vocabulary:
    """Reads the vocabulary of a model without its weights.

    Raises:
        InputError: as ``load``, for what concerns the vocabulary.
    """
    directory = find_directory(directory_or_name)
    values = _read_config(directory)
    if _is_native(values, directory):
        return native.read_vocabulary(values, directory)
    return huggingface.read_vocabulary(values, directory)


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
    if directory.is_dir():
        return directory
    if directory.exists():
        raise InputError(f"{directory} is a file: give the directory that holds it")
    names = packaged_names()
    if str(directory_or_name) in names:
        return PACKAGED_MODELS / str(directory_or_name)
    packaged = f", or one of the packaged {', '.join(names)}" if names else ""
    raise InputError(f"no directory {directory}: give the path of a checkpoint{packaged}")


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG_NAME).is_file():
        raise InputError(
            f"{directory} holds no {CONFIG_NAME}: give a spec_t5x or Hugging Face T5 checkpoint"
        )
    return read_json(directory / CONFIG_NAME)


def _is_native(values: dict[str, Any], directory: Path) -> bool:
    """Whether a model is of the project's own format; else it is Hugging Face's."""
    if values.get("format") == native.FORMAT:
        return True
    if "model_type" in values:
        return False
    raise InputError(
        f"{directory / CONFIG_NAME} has neither format {native.FORMAT!r} nor a "
        "model_type: give a spec_t5x or Hugging Face T5 checkpoint"
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
    if isinstance(target, SentencePieceVocabulary):
        pairs = zip(_pieces(target), _pieces(draft), strict=False)
        for index, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                return f"id {index} is {ours!r} and {theirs!r}"
    return f"{target.vocab_size} and {draft.vocab_size} ids"


def _pieces(vocabulary: SentencePieceVocabulary) -> list[str]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary.path))
    count = processor.get_piece_size()
    pieces = [processor.id_to_piece(index) for index in range(count)]
    return pieces + [f"<extra_id_{i}>" for i in reversed(range(vocabulary.extra_ids))]
