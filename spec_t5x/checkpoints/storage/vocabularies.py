"""Vocabularies of checkpoints that come without one, as T5X's do.

    spiece.model        a SentencePiece model, on this machine or in a bucket (gs://)
    spiece.model:100    the same with so many extra ids appended
    bytes, bytes:125    ByT5's
    tokenizer.json      a vocabulary of a registered kind, on this machine

Extra ids (``<extra_id_0>``, …) decide the meaning of an id, so their number is never guessed.
Without one, it is 0 if the file holds them itself (mT5's, and T5X's ``…100extra`` files),
and is otherwise inferred from the rows of the embedding, which T5 pads to a multiple of 128: 32128
for 32000 pieces and 100 extra ids. If both 0 and 100 fit, that is an error.
"""

import hashlib
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
from spec_t5x.errors import InputError
from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.compilation_cache import user_cache

# Numbers of extra ids that T5 and ByT5 were trained with.
_T5_EXTRA_IDS, _BYTE_EXTRA_IDS = 100, 125
# Embeddings are padded to a multiple of this.
_PADDING = 128

# A vocabulary, or its name on the command line.
VocabularyLike = Vocabulary | str | Path


def make_vocabulary(vocabulary: VocabularyLike, num_rows: int | None) -> Vocabulary:
    """Makes a named vocabulary (see above) for an embedding of ``num_rows``.

    None infers nothing: a file without a number has no extra ids but its own.

    Raises:
        InputError: no such file, no vocabulary in it, or an ambiguous number of extra ids.
    """
    if isinstance(vocabulary, Vocabulary):
        return vocabulary
    if str(vocabulary).endswith(".json"):
        path = Path(vocabulary)
        return registry.find("tokenizer", kind_of_tokenizer(path))(path)
    name, extra_ids = _split_extra_ids(str(vocabulary))
    if name == "bytes":
        if extra_ids is None:
            # They decode to nothing: their number only counts.
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
    """Returns a checkpoint's own vocabulary, if it has one, which a given one must not contradict.

    Without either, a ``spiece.model`` in the directory or in the one above is taken.
    """
    if given is None and own is None and isinstance(directory, Path):
        # Resolved: the directory above "." is its parent.
        files = (path / SPIECE_NAME for path in (directory, directory.resolve().parent))
        given = next((file for file in files if file.is_file()), None)
    other = None if given is None else make_vocabulary(given, num_rows)
    if own is None or other is None:
        return own or other
    if other.fingerprint() != own.fingerprint():
        named = repr(str(given)) if isinstance(given, str | Path) else "the one given"
        raise InputError(
            f"{directory} holds a vocabulary of its own ({own.vocab_size} ids), which is not "
            f"{named} ({other.vocab_size} ids): leave vocabulary out"
        )
    return own


def local_file(location: Location) -> Path:
    """Returns a file, or the copy of one in a bucket, which is fetched once."""
    if isinstance(location, Path):
        return location
    digest = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    path = user_cache() / "vocabularies" / f"{digest}-{location.name}"
    if not path.is_file():
        try:
            content = location.read_bytes()
        except FileNotFoundError as error:
            raise InputError(
                f"no vocabulary at {location}: give a SentencePiece model file"
            ) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [content])
    return path


def _split_extra_ids(text: str) -> tuple[str, int | None]:
    """Splits ``FILE:100``; a file with a colon in its name comes first."""
    name, colon, number = text.rpartition(":")
    if not colon or not number.isdigit() or Path(text).is_file():
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
            f"the model embeds {num_rows} ids and {vocabulary.path} holds {size}: how many extra "
            f"ids there are is ambiguous; append the number to the file, as in "
            f"{vocabulary.path.name}:{_T5_EXTRA_IDS} or {vocabulary.path.name}:0"
        )
    return fitting[0]
