"""T5's vocabulary as transformers 5 writes it: the Unigram model of a ``tokenizer.json``.

The ids of a text are those of transformers, with two changes: ``</s>`` and ``<pad>`` in a text are
encoded as text, not as special tokens, and truncation and padding are left to callers. The text of
ids is that of the SentencePiece model that the file was made from or, if tokens were added to T5's,
with new ids or as pieces of the model, that of transformers with ``skip_special_tokens``.

In texts without sentinels four differences to SentencePiece remain. White space of any kind and
length is one space (T5's own model excepts U+0085). A word that begins with U+2581, the space
within pieces, has no separate piece for it. Between two segmentations with equal scores rounding
decides, which is in float64 here. As in transformers, a combining mark is lost after a character
that NFKC rewrites ("²" and U+0304).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from spec_t5x.data.mapped_vocabulary import of_text
from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME, TokenizerVocabulary, type_of_model
from spec_t5x.data.vocabulary import ids_before_eos, is_sentinel
from spec_t5x.errors import InputError, as_input_error
from spec_t5x.machine.git_lfs import check_fetched
from spec_t5x.types import UNK_ID

# Ids 0, 1 and 2.
SPECIAL_PIECES = ("<pad>", "</s>", "<unk>")
_SPECIAL_IDS = range(len(SPECIAL_PIECES))
_SPACE = "▁"
# SentencePiece's text for a character that no piece has.
_UNKNOWN = " ⁇ "


class UnigramVocabulary(TokenizerVocabulary):
    """The vocabulary of a Unigram ``tokenizer.json`` with T5's special ids.

    ``extra_ids`` is the number of the file's sentinels, which are among its ids.
    """

    def __init__(self, path: str | Path, content: bytes | None = None):
        """Loads the file ``path``; if ``content`` is given, it replaces the file's bytes.

        Raises ``InputError`` unless it is a Unigram model with special ids pad 0, eos 1, unk 2.
        """
        path = Path(path)
        if content is None and not path.is_file():
            raise InputError(f"no vocabulary at {path}: give a {TOKENIZER_NAME}")
        check_fetched(path)
        self._content = path.read_bytes() if content is None else content
        what = f"{path} is no Unigram model of the tokenizers library"
        with as_input_error(what, f"give T5's {TOKENIZER_NAME}", Exception):
            values = json.loads(self._content)
            names, foreign = _names(values)
            if fault := _fault(values, names):
                raise InputError(f"{path} {fault}")
            # Decoding uses the unchanged tokenizer if tokens were added, as transformers does.
            self._added = tokenizers.Tokenizer.from_str(json.dumps(values)) if foreign else None
            text = of_text(values, _SPECIAL_IDS)
        super().__init__(text)
        # mT5's sentinels, which follow a space, are ordinary pieces.
        self.extra_ids = sum(is_sentinel(name) for name in names if not name.startswith(_SPACE))
        # Names as in SentencePiece and seqio, where sentinels begin words.
        self._pieces = [_with_space(name) for name in names]

    @property
    def has_added(self) -> bool:
        """Says whether tokens were added to T5's pieces and sentinels."""
        return self._added is not None

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def decode(self, ids: Iterable[int]) -> str:
        kept = ids_before_eos(ids, self.vocab_size, self.eos_ids)
        if self._added is not None:
            return self.cleaned(self._added.decode(kept, skip_special_tokens=True))
        text = "".join(_UNKNOWN if i == UNK_ID else self._pieces[i] for i in kept)
        return self.cleaned(text.lstrip(_SPACE).replace(_SPACE, " "))

    def piece(self, token: int) -> str:
        return self._pieces[token]

    def save(self, directory: str | Path) -> None:
        """Writes ``directory/tokenizer.json`` as it was read."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / TOKENIZER_NAME).write_bytes(self._content)


def pieces_of(values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns a ``tokenizer.json``'s pieces, named as SentencePiece's, and tokens added to T5's."""
    names, foreign = _names(values)
    return [_with_space(name) for name in names], foreign


def is_t5s(values: dict[str, Any]) -> bool:
    """Tells whether a ``tokenizer.json`` is a Unigram model with T5's special ids."""
    return type_of_model(values) == "Unigram" and _fault(values, _names(values)[0]) is None


def _names(values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the names of all ids, and the added tokens that are neither special nor sentinels."""
    names = [name for name, _ in values["model"]["vocab"]]
    known = set(names)
    # Older releases of transformers store the sentinels outside of the model.
    added = {token["id"]: token["content"] for token in values["added_tokens"]}
    names += [added[token] for token in sorted(added) if added[token] not in known]
    for token, name in added.items():
        if token >= len(names):
            raise ValueError(f"id {token} is {name!r}, beyond the {len(names)} tokens")
        if names[token] != name:
            raise ValueError(f"id {token} is {names[token]!r} and {name!r}")
    usual = set(names[: len(SPECIAL_PIECES)])
    return names, [name for name in added.values() if name not in usual and not is_sentinel(name)]


def _fault(values: dict[str, Any], names: list[str]) -> str | None:
    """Returns the difference of a model to T5's, with a remedy; None if there is none."""
    model, kind = values["model"], type_of_model(values)
    if kind != "Unigram" or model.get("byte_fallback"):
        return (
            f"has a model of type {kind!r} (byte_fallback "
            f"{model.get('byte_fallback', False)}): give T5's Unigram model, without byte_fallback"
        )
    unknown = model.get("unk_id")
    if tuple(names[: len(SPECIAL_PIECES)]) == SPECIAL_PIECES and unknown == UNK_ID:
        return None
    return (
        f"begins with {', '.join(names[: UNK_ID + 1])} and its unknown piece has "
        f"id {unknown}, T5's begins with {', '.join(SPECIAL_PIECES)}: give a model with "
        "T5's special ids"
    )


def _with_space(name: str) -> str:
    return _SPACE + name if is_sentinel(name) and not name.startswith(_SPACE) else name
