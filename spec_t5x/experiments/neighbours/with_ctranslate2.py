"""CTranslate2: a C++ engine for Transformers, in float32 or with int8 weights."""

from concurrent.futures import ThreadPoolExecutor

import ctranslate2

from spec_t5x.experiments.neighbours.interface import Job
from spec_t5x.types import EOS_ID, PAD_ID

_FOLDER = "ctranslate2"
# T5's.
_UNKNOWN_ID = 2


class Decoder:
    """A translator whose tokens are the ids, written out as numbers."""

    def __init__(self, translator: ctranslate2.Translator):
        self._translator = translator

    def decode(self, ids: list[int], max_tokens: int) -> list[int]:
        """See ``interface.Decoder``."""
        (result,) = self._translator.translate_batch(
            [list(map(str, ids))],
            beam_size=1,
            max_decoding_length=max_tokens,
            # Its default cuts sources at 1024 tokens.
            max_input_length=0,
            return_end_token=True,
        )
        return list(map(int, result.hypotheses[0]))

    def encode(self, ids: list[int]) -> bool:
        """It has no call for the encoder of a translator."""
        return False


def version() -> str:
    """Its own."""
    return f"CTranslate2 {ctranslate2.__version__}"


def prepare(job: Job) -> None:
    """Converts the copy once, for both types: int8 is made of float32 when it is loaded."""
    # Here, so that what decodes need not import PyTorch.
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):
        """Reads the weights with transformers; names tokens by their ids."""

        def load_model(self, model_class, model_name_or_path, **kwargs):
            model = super().load_model(model_class, model_name_or_path, **kwargs)
            self._num_ids = model.config.vocab_size
            return model

        def load_tokenizer(self, tokenizer_class, model_name_or_path, **kwargs):
            return _Ids(self._num_ids)

    Converter(job.target_copy).convert(str(job.made(_FOLDER)), quantization="float32")


class _Ids:
    """What the converter asks of a tokenizer, whose tokens are their own ids."""

    pad_token = str(PAD_ID)
    eos_token = str(EOS_ID)
    unk_token = str(_UNKNOWN_ID)

    def __init__(self, number: int):
        self._number = number

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self._number)}

    def convert_ids_to_tokens(self, index: int) -> str:
        return str(index)


def make(job: Job, *, compute_type: str) -> Decoder:
    """A translator.

    Args:
      job: the copies of the weights, converted by ``prepare``.
      compute_type: "float32" or "int8", as CTranslate2 names them.
    """
    # Loading takes a team of threads, and decoding, in a thread of CTranslate2's own, another.
    # Where both are there, GNU's OpenMP finds more threads than processors and has them sleep
    # between the parts of a step: on two processors decoding then takes seven times as long.
    # The first team ends with the thread that it was made in.
    with ThreadPoolExecutor(1) as loading:
        translator = loading.submit(
            ctranslate2.Translator,
            str(job.made(_FOLDER)),
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=job.threads,
        ).result()
    return Decoder(translator)
