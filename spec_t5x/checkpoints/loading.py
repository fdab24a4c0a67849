"""Loading of checkpoints in any supported format, and comparison of their vocabularies."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.formats import NATIVE, Format, format_of
from spec_t5x.checkpoints.huggingface import generation_config, hub
from spec_t5x.checkpoints.huggingface import t5 as huggingface_t5
from spec_t5x.checkpoints.huggingface.vocabulary_files import has_tokenizer
from spec_t5x.checkpoints.native import model_files
from spec_t5x.checkpoints.storage import vocabularies
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, read_json, recover
from spec_t5x.checkpoints.storage.locations import GcsPath, Location, locate
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, Shardings, StoredModel
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.data.mapped_vocabulary import MappedVocabulary
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError, check_choice, did_you_mean, shown
from spec_t5x.machine.paths import expanded
from spec_t5x.machine.progress import doing
from spec_t5x.names import AUTO, STORED_DTYPES, WEIGHTS

log = logging.getLogger(__name__)

PACKAGED_MODELS = Path(__file__).parents[1] / "pretrained"
# Entries of config.json as which a folder of tokenizer files alone is read: those of a T5.
_OF_T5 = {"model_type": "t5"}


def load(
    directory_or_name: str | Path | GcsPath | StoredModel,
    *,
    dtype: str = "float32",
    vocabulary: VocabularyLike | None = None,
    shardings: Shardings | None = None,
    for_decoding: bool = False,
    weights: str = AUTO,
) -> LoadedModel:
    """Reads a model of any of the ``formats``, recognized by its files.

    Args:
        directory_or_name: a directory, a packaged model's name, or ``OWNER/NAME`` of a model on
            the Hugging Face Hub; an existing directory has precedence. A T5X checkpoint
            (``…/checkpoint_1000000``), or a directory of several, whose latest is read, may be
            in a bucket (``gs://…``). An opened model is one of ``open_model``.
        dtype: "float32" or "bfloat16", the type of the parameters and ``config.dtype``.
        vocabulary: vocabulary of a checkpoint without one, as T5X's are: a ``Vocabulary``, a
            SentencePiece file, ``FILE:100`` with 100 extra ids, "bytes", tokenizer.json, or
            another model. If the checkpoint has one, the two must be equal.
        shardings: function from the configuration to a tree of shardings like the parameters,
            for example ``models.partitioning.param_shardings`` with the mesh bound. Each process
            then reads only the slices that its devices hold. None puts all parameters on JAX's
            default device.
        for_decoding: packs each parameter as it is read, as ``LoadedModel.bind`` would later,
            if this machine has kernels that need it, and there are no ``shardings``.
        weights: "int8" and "int4" round the matrices, "auto" those of a rounded model: one by one
            as they are read, if ``for_decoding``, else as they are bound.

    Raises:
        InputError: the model is missing, damaged or not supported, has no vocabulary, or is larger
            than the free memory of a GPU or TPU.
    """
    # Checked first: opening may download gigabytes.
    check_choice("dtype", dtype, STORED_DTYPES)
    check_choice("weights", weights, WEIGHTS)
    if not (shardings is None or callable(shardings)):
        raise InputError(f"shardings are a {type(shardings).__name__}: give a function")
    stored = directory_or_name
    if not isinstance(stored, StoredModel):
        stored = open_model(directory_or_name, vocabulary=vocabulary)
    elif vocabulary is not None:
        raise InputError(f"vocabulary is {vocabulary} and the model is open: give it to open_model")
    with doing(log, shown(f"loading {stored.directory}")):
        return stored.load(
            dtype=dtype, shardings=shardings, for_decoding=for_decoding, weights=weights
        )


def open_model(
    directory_or_name: str | Path | GcsPath,
    *,
    vocabulary: VocabularyLike | None = None,
    downloads: bool = True,
) -> StoredModel:
    """Opens a model as ``load`` does, but for its weights.

    Those that are still on the Hub are downloaded or, if not ``downloads``, left out.
    """
    directory, values, format = _recognized(find(directory_or_name))
    if not is_absent(directory_or_name):
        stored = format.open_model(directory, values)
    elif downloads:
        hub.download_weights(directory_or_name)
        stored = format.open_model(directory, values)
    else:
        stored = dataclasses.replace(format.open_model(directory, values, False), tensors=None)
    metadata = stored.metadata
    if values is not None and "format" not in values:
        settings = generation_config.read(directory, values)
        metadata = {**metadata, generation_config.GENERATION: settings} if settings else metadata
    rows = stored.config.vocab_size
    if "model_type" not in (values or {}):
        values = _OF_T5 | {"vocab_size": rows}
    given = _of_another_model(vocabulary, values)
    chosen = vocabularies.choose_vocabulary(given, stored.vocabulary, stored.directory, rows)
    return dataclasses.replace(stored, vocabulary=chosen, metadata=metadata)


def load_vocabulary(directory_or_name: str | Path | GcsPath) -> Vocabulary:
    """Reads a model's vocabulary, from the Hub without the weights."""
    return open_model(directory_or_name, downloads=False).known_vocabulary()


def has_source(target: str | Path | GcsPath) -> bool:
    """Tells whether a target has an encoder; reads config.json alone."""
    directory, values, format = _recognized(find(target))
    if format is NATIVE:
        return model_files.read_config(values, directory / CONFIG_NAME).has_source
    return format.config.has_source


def named_vocabulary(vocabulary: VocabularyLike, num_rows: int | None = None) -> Vocabulary:
    """Returns the vocabulary of a name, as in ``load``, for an embedding of ``num_rows``."""
    return vocabularies.make_vocabulary(_of_another_model(vocabulary), num_rows)


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel | StoredModel) -> None:
    """Raises ``InputError``, naming the first difference, if the draft's ids mean other tokens."""
    pair = target.vocabulary, draft.vocabulary
    if not _same_ids(*pair):
        raise InputError(
            f"target {target.directory} and draft {draft.directory} have different vocabularies "
            f"({_first_difference(*pair)}): give a draft trained with the target's vocabulary"
        )


def _same_ids(target: Vocabulary, draft: Vocabulary) -> bool:
    """Tells whether each id of the draft is the same token in the target, which may have more."""
    if target.fingerprint() == draft.fingerprint():
        return True
    if isinstance(target, MappedVocabulary) and isinstance(draft, MappedVocabulary):
        # A fingerprint covers padding, too, of which one model may have more.
        return target.named_pieces() == draft.named_pieces()
    if not (isinstance(target, UnigramVocabulary) and target.has_added):
        return False
    # A draft made before tokens were added to the target never proposes them.
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


def packaged_names() -> list[str]:
    """Lists the names of the packaged models, sorted: directories of ``PACKAGED_MODELS``."""
    return sorted(path.parent.name for path in PACKAGED_MODELS.glob(f"*/{CONFIG_NAME}"))


def find(directory_or_name: str | Path | GcsPath) -> Location:
    """Returns a bucket's path unchecked, and ``find_directory`` of any other name."""
    location = locate(directory_or_name)
    return location if isinstance(location, GcsPath) else find_directory(directory_or_name)


def find_directory(directory_or_name: str | Path) -> Path:
    """Returns the directory of a path, a packaged model or a model on the Hub.

    A Hub model's files, except its weights, are downloaded to the Hub's cache. Raises
    ``InputError`` if there is no model of this name, or the Hub's model is not supported.
    """
    directory = expanded(directory_or_name)
    recover(directory)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise InputError(f"{directory} is a file: give the directory that holds it")
    names, name = packaged_names(), str(directory_or_name).rstrip("/")
    if name in names:
        return PACKAGED_MODELS / name
    if is_on_hub(directory_or_name):
        return _checked(directory_or_name, hub.snapshot(directory_or_name))
    packaged = f", or one of the packaged {', '.join(names)}" if names else ""
    raise InputError(
        f"no directory {directory_or_name}{did_you_mean(name, names, cutoff=0.85)}: give the path "
        f"of a checkpoint, OWNER/NAME of one on the Hugging Face Hub{packaged}"
    )


def is_on_hub(directory_or_name: str | Path | GcsPath) -> bool:
    """Tells whether a name has the form ``OWNER/NAME`` and is no existing path on this machine."""
    if not isinstance(directory_or_name, str) or not hub.NAME.fullmatch(directory_or_name):
        return False
    recover(Path(directory_or_name))
    return not Path(directory_or_name).exists()


def is_absent(directory_or_name: str | Path | GcsPath) -> bool:
    """Tells whether a model's weights are on the Hub and still have to be downloaded."""
    return is_on_hub(directory_or_name) and not hub.has_weights(directory_or_name)


def _checked(name: str, directory: Path) -> Path:
    """Returns ``directory``; raises ``InputError`` if the Hub model in it is not supported."""
    with describing(name, "model"):
        _, values, format = _recognized(directory)
        if format.check_supported is not None:
            format.check_supported(values, directory)
    if format is NATIVE:
        raise InputError(
            f"{name} is a checkpoint of spec_t5x: run `{hub.command(name)} --local-dir DIR` and "
            "give DIR"
        )
    return directory


def _recognized(directory: Location) -> tuple[Location, dict[str, Any] | None, Format]:
    """Returns the directory, the content of its config.json (None without one), and its format."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        return directory, None, format_of(directory, None)
    if isinstance(directory, GcsPath):
        raise InputError(
            f"{directory} holds a {CONFIG_NAME}: copy it to this machine; only T5X checkpoints "
            "are read from a bucket"
        )
    values = read_json(path)
    return directory, values, format_of(directory, values)


def _of_another_model(
    vocabulary: VocabularyLike | None, values: dict[str, Any] = _OF_T5
) -> VocabularyLike | None:
    """Reads the vocabulary of a model given by directory or name; returns others unchanged.

    A folder of tokenizer files alone is read as that of a model with config.json ``values``.
    """
    if isinstance(vocabulary, str | Path):
        name = expanded(vocabulary)
        if has_tokenizer(name) and not (name / CONFIG_NAME).is_file():
            return huggingface_t5.read_vocabulary(name, values)
        # ``OWNER/NAME.model`` is a missing file, not a model on the Hub.
        on_hub = is_on_hub(vocabulary) and name.suffix not in (".model", ".json")
        packaged = str(vocabulary) in packaged_names() and not name.exists()
        if name.is_dir() or packaged or on_hub:
            return load_vocabulary(vocabulary)
    return vocabulary
