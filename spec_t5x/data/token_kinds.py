"""What kind of token an id stands for, by its piece: where drafts do well and where not."""

import numpy as np

from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.types import EOS_ID

# A whole word that begins, or its first piece.
WORD = "word"
# A piece that goes on with a word.
CONTINUATION = "continuation"
PUNCTUATION = "punctuation"
# Digits, perhaps with what separates them: 2,500.
DIGITS = "digits"
END = "end"
# Padding, unknown, sentinels, and the padding of the embedding.
OTHER = "other"

# Of a piece that begins a word: SentencePiece's and GPT-2's. WordPiece marks the others.
_BEGINS = ("\u2581", "\u0120")
_GOES_ON = "##"


def token_kinds(vocabulary: Vocabulary, vocab_size: int) -> np.ndarray:
    """The kind of each id, ``[vocab_size]`` names.

    A vocabulary that marks no words, as bytes, has no piece of which one could say that a
    word begins there: its letters are all continuations.

    Args:
      vocabulary: what the ids mean.
      vocab_size: ids that a model may emit, the padding of its embedding included.
    """
    known = min(vocabulary.vocab_size, vocab_size)
    pieces = [vocabulary.piece(token) for token in range(known)]
    is_wordpiece = any(piece.startswith(_GOES_ON) and piece != _GOES_ON for piece in pieces)
    is_wordpiece &= not any(piece.startswith(_BEGINS) for piece in pieces)
    kinds = [_kind(piece, is_wordpiece) for piece in pieces] + [OTHER] * (vocab_size - known)
    kinds[EOS_ID] = END
    return np.array(kinds)


def _kind(piece: str, is_wordpiece: bool) -> str:
    begins = piece.startswith(_BEGINS)
    if is_wordpiece:
        begins = not piece.startswith(_GOES_ON)
        text = piece.removeprefix(_GOES_ON)
    else:
        text = piece[1:] if begins else piece
    if len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]")):
        # <unk>, [UNK], <extra_id_0>; bytes that are no ASCII are parts of letters.
        return CONTINUATION if text.startswith("<0x") else OTHER
    if not any(character.isalnum() for character in text):
        # The mark of a word alone begins one.
        return PUNCTUATION if text else WORD
    if not any(character.isalpha() for character in text):
        return DIGITS
    return WORD if begins else CONTINUATION
