"""Training of SentencePiece vocabularies with T5's special ids."""

from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from spec_t5x.data.vocabulary import model_proto
from spec_t5x.errors import InputError
from spec_t5x.types import EOS_ID, PAD_ID, UNK_ID

# SentencePiece sums expected counts thread by thread, so that its result depends on the number of
# threads. A constant gives the same vocabulary on every machine.
_TRAINER_THREADS = 4


def train_sentencepiece(
    text_iterator: Iterable[str],
    model_prefix_path: str | Path,
    vocab_size: int,
    *,
    character_coverage: float = 0.9999,
) -> Path:
    """Trains a unigram vocabulary with T5's special ids and no BOS.

    Normalisation is the identity and runs of spaces are kept: T5's own ``nmt_nfkc`` rewrites
    characters ("…" to "...", "²" to "2") that the decoder could then never produce. In return, rare
    characters that NFKC would map to known ones are unknown here, and decode to " ⁇ ".

    Args:
        text_iterator: texts in all languages of the vocabulary.
        model_prefix_path: ``<prefix>.model`` and ``<prefix>.vocab`` are written.
        vocab_size: number of pieces, the three special ones included.
        character_coverage: share of the texts' characters that have a piece, 0 to 1.

    Returns:
        The path of the model file.

    Raises:
        InputError: the texts are too few for ``vocab_size`` pieces, or there are none.
    """
    prefix = Path(model_prefix_path)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Equal texts give equal vocabularies.
    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text_iterator),
            model_prefix=str(prefix),
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            byte_fallback=False,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=_TRAINER_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        # SentencePiece's message begins with its source line and the condition that failed.
        reason = str(error).splitlines()[-1].rpartition("] ")[2].strip(" .")
        raise InputError(
            f"no vocabulary of {vocab_size} pieces from these texts ({reason}): "
            "change vocab_size or give more text"
        ) from error
    path = prefix.with_name(prefix.name + ".model")
    # Removes the local path of training, so that equal vocabularies are equal files.
    model = model_proto().FromString(path.read_bytes())
    model.trainer_spec.ClearField("model_prefix")
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path
