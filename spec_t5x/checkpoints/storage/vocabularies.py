"""Vocabularies, given by name, for checkpoints without one, such as T5X's.

    spiece.model        a SentencePiece model, on this machine or in a bucket (gs://)
    spiece.model:100    the same with 100 extra ids appended
    bytes, bytes:125    ByT5's with 125 extra ids; without a number, as many as fit, 125 at most
    tokenizer.json      a vocabulary of a registered kind, on this machine

The number of extra ids (``<extra_id_0>``, …) decides the meaning of ids, so it is never guessed.
If no number is given, it is 0 if the file contains extra ids (mT5's, and T5X's ``…100extra``
files), and is otherwise inferred from the rows of the embedding, which T5 pads to a multiple of
128: 32128 for 32000 pieces and 100 extra ids. If both or neither of 0 and 100 fit, it is an error.
"""

import hashlib
import re
from pathlib import Path

from spec_t5x import registry
from spec_t5x.checkpoints.storage.locations import Location, locate
from spec_t5x.data.tokenizer_vocabulary import kind_of_tokenizer
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from spec_t5x.errors import InputError, as_input_error
from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.compilation_cache import user_cache
from spec_t5x.machine.paths import expanded

# Numbers of extra ids that T5 and ByT5 were trained with.
_T5_EXTRA_IDS, _BYTE_EXTRA_IDS = 100, 125
# A training's checkpoint, beside which trainers write the vocabulary.
_STEP = re.compile(r"checkpoint[-_]\d+")
# Rows of an embedding are padded to a multiple of this number.
_PADDING = 128

# A vocabulary, or its name as in the table above.
VocabularyLike = Vocabulary | str | Path


def make_vocabulary(vocabulary: VocabularyLike, num_rows: int | None) -> Vocabulary:
    """Returns the named vocabulary (see above) for an embedding of ``num_rows``.

    If ``num_rows`` is None, no number is inferred, and 0 extra ids are appended (125 for "bytes").

    Raises ``InputError`` if the file is absent or no vocabulary, or the number is ambiguous.
    """
    if isinstance(vocabulary, Vocabulary):
        return vocabulary
    if str(vocabulary).endswith(".json"):
        path = expanded(vocabulary)
        return registry.find("tokenizer", kind_of_tokenizer(path))(path)
    name, extra_ids = _split_extra_ids(str(vocabulary))
    if name == "bytes":
        if extra_ids is None:
            # Extra ids of bytes decode to nothing, so only the size depends on their number.
            rows = num_rows or ByteVocabulary(_BYTE_EXTRA_IDS).vocab_size
            extra_ids = min(_BYTE_EXTRA_IDS, max(rows - ByteVocabulary(0).vocab_size, 0))
        return ByteVocabulary(extra_ids)
    path = local_file(locate(name))
    if extra_ids is None and num_rows is not None:
        extra_ids = _infer_extra_ids(SentencePieceVocabulary(path), num_rows)
    return SentencePieceVocabulary(path, extra_ids or 0)


def choose_vocabulary(
    given: VocabularyLike | None, own: Vocabulary | None, directory: Location, num_rows: int
) -> Vocabulary | None:
    """Returns a checkpoint's ``own`` vocabulary, or the ``given`` one; refuses two that differ.

    If both are None, a ``spiece.model`` in ``vocabulary_folders`` is used, if any.
    """
    if given is None and own is None and isinstance(directory, Path):
        files = (path / SPIECE_NAME for path in vocabulary_folders(directory))
        given = next((file for file in files if file.is_file()), None)
    other = None if given is None else make_vocabulary(given, num_rows)
    if own is None or other is None:
        return own or other
    if other.fingerprint() != own.fingerprint():
        named = repr(str(given)) if isinstance(given, str | Path) else "the one given"
        raise InputError(
            f"{directory} already holds a vocabulary ({own.vocab_size} ids), which differs from "
            f"{named} ({other.vocab_size} ids): leave vocabulary out"
        )
    return own


def vocabulary_folders(directory: Path) -> list[Path]:
    """Returns the folders that may hold a model's vocabulary: its own and its training's."""
    # Resolved: the directory above "." is its parent.
    own = directory.resolve()
    return [directory, own.parent] if _STEP.fullmatch(own.name) else [directory]


def local_file(location: Location) -> Path:
    """Returns a local path: ``location``, or the cached copy of a bucket's file, fetched once."""
    if isinstance(location, Path):
        return location
    digest = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    path = user_cache() / "vocabularies" / f"{digest}-{location.name}"
    if not path.is_file():
        what, remedy = f"no vocabulary at {location}", "give a SentencePiece model file"
        with as_input_error(what, remedy, FileNotFoundError):
            content = location.read_bytes()
        remedy = "make room there, or set XDG_CACHE_HOME"
        with as_input_error(f"cannot write {path}", remedy, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, [content])
    return path


def _split_extra_ids(text: str) -> tuple[str, int | None]:
    """Splits ``FILE:100``; the number is None if absent, or if a file is called ``text``."""
    name, colon, number = text.rpartition(":")
    if not colon or not number.isdigit() or expanded(text).is_file():
        return text, None
    return name, int(number)


def _infer_extra_ids(vocabulary: SentencePieceVocabulary, num_rows: int) -> int:
    size = vocabulary.vocab_size
    if any("<extra_id_0>" in vocabulary.piece(token) for token in range(size)):
        return 0
    sums = {number: size + number for number in (0, _T5_EXTRA_IDS)}
    fitting = [n for n, ids in sums.items() if num_rows in (ids, -(-ids // _PADDING) * _PADDING)]
    if len(fitting) != 1:
        raise InputError(
            f"the model embeds {num_rows} ids and {vocabulary.path} holds {size}: the number of "
            f"extra ids is ambiguous; append it to the file's name, as in "
            f"{vocabulary.path.name}:{_T5_EXTRA_IDS} or {vocabulary.path.name}:0"
        )
    return fitting[0]
