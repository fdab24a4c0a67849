"""A tokenizer of the ``tokenizers`` library with other ids than ours, as GPT-2's.

Here id 0 starts (and pads) and id 1 ends a text. There both may be one token, and any token may
have id 0. So the ids are renumbered: 0 is a second copy of the token that starts, 1 is the one that
ends, and the others follow from 2 on in their order.

    theirs      0    1    2   …   50255   50256 <|endoftext|>
    ours        2    3    4   …   50257   1 (and 0, as the start)
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME, TokenizerVocabulary
from spec_t5x.data.vocabulary import ids_before_eos
from spec_t5x.errors import InputError
from spec_t5x.machine.git_lfs import check_fetched
from spec_t5x.types import EOS_ID, Array, Int

# The two files of GPT-2's tokenizer from before ``tokenizer.json``.
VOCAB_NAME, MERGES_NAME = "vocab.json", "merges.txt"


def their_ids(num_ids: int, start_id: int, eos_id: int) -> Int[Array, "ours"]:
    """Returns the tokenizer's id of each of our ``num_ids + 1``.

    Raises:
        InputError: an id that is not below ``num_ids``.
    """
    for name, token in (("start", start_id), ("eos", eos_id)):
        if not 0 <= token < num_ids:
            raise InputError(f"the {name} token's id is {token} of {num_ids}: give a lower one")
    others = np.delete(np.arange(num_ids), eos_id)
    return np.concatenate([[start_id, eos_id], others])


class MappedVocabulary(TokenizerVocabulary):
    """A tokenizer with its ids renumbered as above."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        num_ids: int,
        start_id: int,
        eos_id: int,
        more_eos_ids: Sequence[int] = (),
    ):
        """Takes the tokenizer, its ids that start and end a text, and the model's number of ids.

        ``more_eos_ids`` end an output, too; in a source they are tokens like others.
        """
        self.num_ids, self.start_id, self.eos_id = num_ids, start_id, eos_id
        self.more_eos_ids = tuple(more_eos_ids)
        self._theirs = their_ids(num_ids, start_id, eos_id)
        # A token of a text never becomes the copy at 0.
        self._ours = np.argsort(self._theirs[1:], kind="stable") + 1
        self._original = tokenizer
        super().__init__(of_text(json.loads(tokenizer.to_str()), {start_id, eos_id}))
        frame = frame_of(tokenizer, self.from_theirs)
        # Says whether the tokenizer frames a text.
        self.has_frame = frame is not None
        self.source_frame = frame or self.source_frame
        self.eos_ids = (EOS_ID, *self.from_theirs(self.more_eos_ids))
        (self.start_in_text,) = self.from_theirs([start_id])

    @property
    def vocab_size(self) -> int:
        return len(self._theirs)

    def from_theirs(self, ids: Sequence[int]) -> list[int]:
        """Returns our ids of the tokenizer's.

        Raises:
            InputError: an id that the model has no row for.
        """
        if ids and max(ids) >= self.num_ids:
            raise InputError(
                f"the tokenizer gives id {max(ids)} and the model has {self.num_ids}: give the "
                "tokenizer that the model was trained with"
            )
        return self._ours[np.asarray(ids, np.int64)].tolist()

    def to_theirs(self, ids: Iterable[int]) -> list[int]:
        """Returns the tokenizer's ids of ours."""
        return self._theirs[np.asarray(list(ids), np.int64)].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text without special tokens, as transformers does."""
        theirs = self.to_theirs(ids_before_eos(ids, self.vocab_size, self.eos_ids))
        return self.cleaned(self._original.decode(theirs, skip_special_tokens=True))

    @property
    def special(self) -> dict[int, str]:
        """The tokenizer's special tokens by its ids."""
        added = self._original.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def named_pieces(self) -> list[str]:
        """Returns the pieces of our ids up to the last that the tokenizer names."""
        names = map(self._original.id_to_token, self._theirs.tolist())
        named = [name is not None for name in names]
        return [self.piece(token) for token in range(len(named) - named[::-1].index(True))]

    def save(self, directory: str | Path) -> None:
        """Writes ``directory/tokenizer.json`` as it was read."""
        TokenizerVocabulary(self._original).save(directory)


def frame_of(
    tokenizer: tokenizers.Tokenizer, ours: Callable[[list[int]], list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the ids that a tokenizer adds around a text, by ``ours``; None if it adds none."""
    around = tokenizer.encode("a")
    if not any(around.special_tokens_mask) or all(around.special_tokens_mask):
        return None
    ids, first = ours(around.ids), around.special_tokens_mask.index(0)
    last = len(ids) - around.special_tokens_mask[::-1].index(0)
    return tuple(ids[:first]), tuple(ids[last:])


def of_text(values: dict[str, Any], special: Collection[int]) -> tokenizers.Tokenizer:
    """Makes the tokenizer of a ``tokenizer.json`` that reads names of special tokens as text."""
    others = [token for token in values["added_tokens"] if token["id"] not in special]
    # The callers truncate and pad.
    changed, model = {"added_tokens": others, "truncation": None, "padding": None}, values["model"]
    if model["type"] == "Unigram":
        # A space is in no word.
        pieces = [
            (f" {name}" if token in special else name, score)
            for token, (name, score) in enumerate(model["vocab"])
        ]
        changed["model"] = model | {"vocab": pieces}
    return tokenizers.Tokenizer.from_str(json.dumps(values | changed))


def read_tokenizer(path: Path) -> tokenizers.Tokenizer | None:
    """Reads a ``tokenizer.json``, or that or GPT-2's two files of a directory; None without any.

    Raises:
        InputError: it cannot be read.
    """
    whole = path if path.is_file() else path / TOKENIZER_NAME
    vocab, merges = path / VOCAB_NAME, path / MERGES_NAME
    try:
        if whole.is_file():
            return tokenizers.Tokenizer.from_file(str(whole))
        if not (vocab.is_file() and merges.is_file()):
            return None
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises nothing more definite
        check_fetched(whole)
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"cannot read the tokenizer in {path} ({reason}): copy its files again"
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
