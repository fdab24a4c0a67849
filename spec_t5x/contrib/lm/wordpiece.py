"""WordPiece vocabularies, as those of BERT (Devlin et al. 2019) and the paper's language models.

Text is lower-cased and split at spaces and punctuation; a piece that continues a word begins with
``##``. Special pieces have the ids of every vocabulary in this project: [START] 0 (also padding),
[END] 1, [UNK] 2.
"""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME, TokenizerVocabulary
from spec_t5x.errors import InputError
from spec_t5x.machine.atomic import write_whole
from spec_t5x.types import EOS_ID, PAD_ID, UNK_ID

SPECIAL_PIECES = ("[START]", "[END]", "[UNK]")
# Maximum number of characters that get a piece: rarer ones, of other scripts, become [UNK].
_ALPHABET = 500


class WordPieceVocabulary(TokenizerVocabulary):
    """WordPiece vocabulary from a ``tokenizer.json`` that ``train_wordpiece`` wrote.

    Decoded text is in lower case, with spaces beside punctuation guessed.
    """

    def __init__(self, path: str | Path):
        """Loads ``path``.

        Raises:
            InputError: the file is absent or damaged, or its first ids are not the special pieces.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no vocabulary at {path}: give a {TOKENIZER_NAME}")
        try:
            super().__init__(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing more definite
            raise InputError(
                f"{path} is not a tokenizer of the tokenizers library: give a {TOKENIZER_NAME}"
            ) from error
        found = tuple(map(self.piece, (PAD_ID, EOS_ID, UNK_ID)))
        if found != SPECIAL_PIECES:
            raise InputError(
                f"{path} begins with {', '.join(found)}, not with {', '.join(SPECIAL_PIECES)}: "
                "train it with train_wordpiece"
            )


def train_wordpiece(texts: Iterable[str], path: str | Path, vocab_size: int) -> Path:
    """Trains a vocabulary of ``vocab_size`` pieces, including the special ones, on lines of text.

    Writes it to ``path`` as a ``tokenizer.json`` and returns ``path``.

    Raises:
        InputError: the texts yield more or fewer pieces than ``vocab_size``.
    """
    learner = _tokenizer(models.WordPiece(unk_token=SPECIAL_PIECES[UNK_ID]))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_PIECES),
        limit_alphabet=_ALPHABET,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    found = learner.get_vocab_size()
    if found != vocab_size:
        raise InputError(
            f"the texts yield {found} pieces, not {vocab_size}: change vocab_size or give more text"
        )
    # A new tokenizer has no special pieces, so that "[END]" in a text does not end it.
    pieces = models.WordPiece(
        learner.get_vocab(), unk_token=SPECIAL_PIECES[UNK_ID], max_input_chars_per_word=100
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [_tokenizer(pieces).to_str(pretty=True).encode()])
    return path


def _tokenizer(model: models.WordPiece) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer
