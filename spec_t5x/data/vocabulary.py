"""Vocabularies with T5's conventions: SentencePiece and bytes.

Both reserve pad 0, eos 1 and unk 2, encode without EOS, and decode up to the first EOS. A target
and its draft must have the same ids, which equal ``fingerprint``s show.
"""

import contextlib
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import sentencepiece

from spec_t5x.errors import InputError, as_input_error, check_numbers
from spec_t5x.machine.git_lfs import check_fetched
from spec_t5x.types import EOS_ID, PAD_ID, UNK_ID, Bool

SPIECE_NAME, MODEL_NAME = "spiece.model", "tokenizer.model"
MOST_EXTRA_IDS = 10**6  # A damaged number must not exhaust the memory.

# Prefixes of pieces that begin a word (SentencePiece, byte-level BPE) or continue one (WordPiece).
_BEGINS, _CONTINUES = ("▁", "Ġ"), "##"
# Texts that transformers' ``clean_up_tokenization_spaces`` strips of spaces, in this order.
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
# Beginning of a piece in a model file: its tag and length.
_PIECE = re.compile(rb"\n([\x80-\xff]*[\x00-\x7f])")
_BYTE_OFFSET = 3  # ids 0, 1, 2 are pad, eos, unk
_NUM_BYTES = 256
# Sentinels with the digits that transformers accepts: no leading zeros.
_SENTINEL = re.compile(r"<extra_id_(0|[1-9][0-9]{0,8})>")


@runtime_checkable
class Vocabulary(Protocol):
    """A map between texts and ids; ids 0, 1 and 2 are pad (and start), eos and unk."""

    # Number of sentinels among the ids.
    extra_ids: int
    # Ids that end an output.
    eos_ids: tuple[int, ...] = (EOS_ID,)
    # The start token's id where it occurs inside a text; at the start its id is 0.
    start_in_text: int = PAD_ID
    # Says whether decoding removes spaces before punctuation, a setting of transformers.
    cleans_up: bool = False
    # Special ids that a model expects before a source and after it.
    source_frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), (EOS_ID,))

    def framed(self, ids: Sequence[int], limit: int | None = None) -> list[int]:
        """Puts a source's ids into ``source_frame``, cut so that all are at most ``limit``."""
        before, after = self.source_frame
        room = None if limit is None else max(limit - len(before) - len(after), 0)
        return [*before, *ids[:room], *after]

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ids and sentinels included."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text, without EOS."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts, in parallel if the tokenizer's library can."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids up to the first EOS, without padding and invalid ids."""

    def cleaned(self, text: str) -> str:
        """Removes spaces before punctuation and contractions from a text if ``cleans_up``."""
        for spaced in _SPACED if self.cleans_up else ():
            text = text.replace(spaced, spaced.strip(" "))
        return text

    def piece(self, token: int) -> str:
        """Returns the piece of an id, with its word-boundary mark ("▁Haus")."""

    def fingerprint(self) -> str:
        """Returns SHA-256 (hex) of the pieces in id order: equal iff the ids mean the same."""
        pieces = [self.piece(token) for token in range(self.vocab_size)]
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()

    def word_starts(self) -> Bool[np.ndarray, "vocab"]:
        """Returns a mask of word starts, punctuation and EOS; all True if no piece marks words."""
        pieces = [self.piece(token) for token in range(self.vocab_size)]
        continues = np.array([piece.startswith(_CONTINUES) for piece in pieces])
        begins = np.array([piece.startswith(_BEGINS) for piece in pieces])
        starts = begins if begins.any() else ~continues
        marks = [not any(map(str.isalnum, piece)) for piece in pieces]
        return starts | marks | (np.arange(self.vocab_size) == EOS_ID)

    def save(self, directory: str | Path) -> None:
        """Writes into ``directory`` the file from which the vocabulary can be loaded."""


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model with T5's extra ids appended after its pieces.

    ``<extra_id_0>`` is the highest id, ``vocab_size - 1``, as in T5.
    """

    def __init__(self, path: str | Path, extra_ids: int = 0, reads_sentinels: bool = False):
        """Loads a SentencePiece model file (``spiece.model``).

        Args:
            extra_ids: number of sentinels to append (100 for the original T5).
            reads_sentinels: whether ``<extra_id_0>`` is a sentinel anywhere in a text, as in
                transformers, and not only where a word begins, as in seqio.

        Raises:
            InputError: the file is absent or not a SentencePiece model, its special ids are not
                pad 0, eos 1, unk 2, or ``extra_ids`` is below 0.
        """
        self.path = Path(path)
        self.extra_ids, self.reads_sentinels = extra_ids, reads_sentinels
        check_numbers(0, MOST_EXTRA_IDS, extra_ids=extra_ids)
        if not self.path.is_file():
            raise InputError(f"no vocabulary at {self.path}: give a SentencePiece model file")
        with _reading(self.path):
            content = _whole(self.path)
            if extra_ids:
                content = _append_sentinels(content, extra_ids)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        found = self._processor.pad_id(), self._processor.eos_id(), self._processor.unk_id()
        if found != (PAD_ID, EOS_ID, UNK_ID):
            raise InputError(
                f"{self.path} has pad, eos, unk = {found}, T5 needs (0, 1, 2): "
                "train it with train_sentencepiece"
            )

    @property
    def vocab_size(self) -> int:
        return self._processor.get_piece_size()

    def encode(self, text: str) -> list[int]:
        first, *others = _split(text, self.extra_ids if self.reads_sentinels else 0)
        if not others:
            return self._processor.encode(text)
        last = self.vocab_size - 1
        encoded = (
            [last - part] if isinstance(part, int) else self._processor.encode(part.strip())
            for part in (first, *others)
        )
        return list(itertools.chain.from_iterable(encoded))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self.reads_sentinels:
            return super().encode_batch(texts)
        return self._processor.encode(list(texts))

    def decode(self, ids: Iterable[int]) -> str:
        kept = ids_before_eos(ids, self.vocab_size, self.eos_ids)
        return self.cleaned(self._processor.decode(kept))

    def piece(self, token: int) -> str:
        return self._processor.id_to_piece(token)

    def save(self, directory: str | Path) -> None:
        """Copies the model file to ``directory/spiece.model``."""
        destination = Path(directory) / SPIECE_NAME
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.resolve() != self.path.resolve():
            shutil.copyfile(self.path, destination)


class ByteVocabulary(Vocabulary):
    """ByT5's vocabulary: the id of a UTF-8 byte is its value plus 3."""

    def __init__(self, extra_ids: int = 125, reads_sentinels: bool = False):
        """Makes the ids of 3 special tokens, 256 bytes and ``extra_ids`` sentinels: 384 in ByT5.

        If ``reads_sentinels``, ``<extra_id_0>`` in a text is encoded as the sentinel (259), as in
        transformers; otherwise as bytes, as in T5X. Raises ``InputError`` if ``extra_ids < 0``.
        """
        self.extra_ids = extra_ids
        self.reads_sentinels = reads_sentinels
        check_numbers(0, MOST_EXTRA_IDS, extra_ids=extra_ids)

    @property
    def vocab_size(self) -> int:
        return _BYTE_OFFSET + _NUM_BYTES + self.extra_ids

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in _split(text, self.extra_ids if self.reads_sentinels else 0):
            values = part.encode("utf-8") if isinstance(part, str) else [_NUM_BYTES + part]
            ids += [value + _BYTE_OFFSET for value in values]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text up to the first EOS, without sentinels and invalid UTF-8."""
        kept = ids_before_eos(ids, _BYTE_OFFSET + _NUM_BYTES, self.eos_ids)
        data = bytes(i - _BYTE_OFFSET for i in kept if i >= _BYTE_OFFSET)
        return self.cleaned(data.decode("utf-8", errors="ignore"))

    def piece(self, token: int) -> str:
        """Returns an id's byte as a printable ASCII character or ``<0xE4>``, others as ``<1>``."""
        byte = token - _BYTE_OFFSET
        if not 0 <= byte < _NUM_BYTES:
            return f"<{token}>"
        return chr(byte) if 32 < byte < 127 else f"<0x{byte:02X}>"

    def word_starts(self) -> Bool[np.ndarray, "vocab"]:
        """Returns a mask of two ids: the space, which begins a word, and EOS."""
        return np.isin(np.arange(self.vocab_size), [EOS_ID, ord(" ") + _BYTE_OFFSET])

    def fingerprint(self) -> str:
        text = f"bytes offset={_BYTE_OFFSET} extra_ids={self.extra_ids}"
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Writes nothing: the vocabulary has no file, only the constructor's arguments."""


def ids_before_eos(ids: Iterable[int], limit: int, eos_ids: Collection[int]) -> list[int]:
    """Returns the ids before the first of ``eos_ids``, without padding and ids >= ``limit``."""
    before = itertools.takewhile(lambda token: token not in eos_ids, map(int, ids))
    return [token for token in before if token != PAD_ID and 0 <= token < limit]


def is_sentinel(piece: str) -> bool:
    """Tells whether a piece is a sentinel, as in T5 (``<extra_id_0>``) or in mT5, after a space."""
    return _SENTINEL.fullmatch(piece.removeprefix(_BEGINS[0])) is not None


def _split(text: str, extra_ids: int) -> Iterator[str | int]:
    """Yields a text's parts and, between them, the numbers of its sentinels below ``extra_ids``."""
    start = 0
    for match in _SENTINEL.finditer(text) if extra_ids else ():
        if int(match[1]) < extra_ids:
            yield text[start : match.start()]
            yield int(match[1])
            start = match.end()
    yield text[start:]


class Spiece(NamedTuple):
    """Pieces of a SentencePiece model, its control and user-defined symbols, and its kind."""

    pieces: list[str]
    symbols: set[str]
    # True if it is like T5's: Unigram, spaces before words, no bytes for unknown characters.
    is_t5s: bool


def read_spiece(path: Path) -> Spiece:
    """Reads a SentencePiece model; raises ``InputError`` if the file is none."""
    with _reading(path):
        model = model_proto().FromString(_whole(path))
    kinds = model_proto().SentencePiece.CONTROL, model_proto().SentencePiece.USER_DEFINED
    symbols = {piece.piece for piece in model.pieces if piece.type in kinds}
    spec = model.trainer_spec
    is_other = spec.treat_whitespace_as_suffix or spec.byte_fallback
    is_t5s = spec.model_type == spec.UNIGRAM and not is_other
    return Spiece([piece.piece for piece in model.pieces], symbols, is_t5s)


def _reading(path: Path) -> contextlib.AbstractContextManager[None]:
    """Converts errors of the ``with`` block to an ``InputError`` that names the model's file."""
    check_fetched(path)
    what, remedy = f"{path} is not a SentencePiece model", "give a spiece.model file"
    return as_input_error(what, remedy, Exception)


def _append_sentinels(content: bytes, extra_ids: int) -> bytes:
    """Appends the pieces ``<extra_id_{n-1}>`` .. ``<extra_id_0>`` to a serialized model."""
    model = model_proto().FromString(content)
    kind = model_proto().SentencePiece.USER_DEFINED
    for i in reversed(range(extra_ids)):
        # The word boundary in front is seqio's: "a <extra_id_0> b" gets no lone boundary piece.
        model.pieces.add(piece=f"\u2581<extra_id_{i}>", score=0.0, type=kind)
    return model.SerializeToString()


def _whole(path: Path) -> bytes:
    """Returns a model file's content; raises ``ValueError`` if its end was cut off."""
    content, at = path.read_bytes(), 0
    while piece := _PIECE.match(content, at):
        at = piece.end() + sum((byte & 127) << 7 * n for n, byte in enumerate(piece[1]))
    # Specifications follow the pieces: a file that is cut off between two of them can be parsed.
    if at == len(content):
        raise ValueError("it ends after its pieces")
    return content


def model_proto() -> Any:
    """Returns the class of a SentencePiece model's message."""
    # Imported here because a model without appended sentinels loads without protobuf.
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto
