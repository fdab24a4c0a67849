"""Loaders of the implementations: each returns a version and a function ``decode``.

``decode(ids, max_tokens)`` takes a source's token ids and returns the ids of the output, decoded
greedily at batch 1. Allocation and compilation do not depend on ``max_tokens``. Functions import
their library themselves, since a process needs only one.
"""

import dataclasses
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

import spec_t5x
from benchmarks.other_implementations.workload import RANDOM, Workload
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.generation.batches import bucket
from spec_t5x.labs.benchmark.simulated_acceptance import SimulatedVerifier
from spec_t5x.names import AUTO
from spec_t5x.types import EOS_ID, PAD_ID

Decode = Callable[[list[int], int], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DrawnVerdicts(GenerateOptions):
    """Options for random weights: verifies as usual, then draws the number of accepted tokens."""

    alpha: float

    def make_verifier(self) -> SimulatedVerifier:
        return SimulatedVerifier(alpha=self.alpha)


def ours(
    workload: Workload,
    *,
    draft: str | None = None,
    gamma: int = 1,
    verifier: str = "block",
    weights: str = AUTO,
    alpha: float | None = None,
) -> tuple[str, Decode]:
    """Loads this package, with a draft by its name for ``make_draft``; None decodes plainly.

    ``RANDOM`` names the workload's draft. With ``alpha``, tokens are accepted at that rate.
    """
    loaded = load(workload.target, dtype="float32", vocabulary=workload.vocabulary)
    model = loaded.bind(weights)
    generator = Generator(
        target=model, vocabulary=loaded.vocabulary, max_source_len=workload.max_source_len
    )
    settings = {"max_decode_len": workload.max_decode_len, "gamma": gamma, "verifier": verifier}
    options = GenerateOptions(**settings)
    if alpha is not None:
        options = _DrawnVerdicts(alpha=alpha, **settings)
    if draft == RANDOM:
        small = load(workload.draft_copy, dtype="float32", vocabulary=workload.vocabulary)
        generator = generator.with_draft(TransformerDraft(small.bind()))
    elif draft:
        made = make_draft(draft, loaded, model, DraftOptions(dtype="float32"))
        generator = generator.with_draft(made)

    def decode(ids: list[int], max_tokens: int) -> list[int]:
        batch = generator.make_batch([""], [ids], [0], options)
        steps = np.full_like(batch.max_decode_steps, max_tokens)
        batch = dataclasses.replace(batch, max_decode_steps=steps)
        decoded = jax.device_get(generator.decode(batch, options))
        return decoded.tokens[0, 0, : decoded.lengths[0, 0]].tolist()

    return f"spec_t5x {spec_t5x.__version__}, JAX {jax.__version__}", decode


def transformers(
    workload: Workload,
    *,
    cache: str | None = None,
    assisted: bool = False,
    gamma: int = 0,
    lookup: int = 0,
) -> tuple[str, Decode]:
    """Loads transformers' greedy ``generate``, whose ``cache`` None is T5's default.

    If ``assisted``, the draft proposes ``gamma`` tokens each time, or with 0 as many as its
    settings say. ``lookup`` is the number of prompt-lookup tokens; 0 disables it.
    """
    import torch
    import transformers

    def read(directory: str):
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
        # transformers sizes the decoder's cache by the encoder's number of layers, which fails if
        # the decoder has more. The network exists already; only caches still read this setting.
        model.config.num_layers = model.config.num_decoder_layers
        return model.eval()

    torch.set_num_threads(workload.threads)
    model, arguments = read(workload.target_copy), {}
    if cache:
        arguments["cache_implementation"] = cache
    if lookup:
        arguments["prompt_lookup_num_tokens"] = lookup
    if assisted:
        arguments["assistant_model"] = assistant = read(workload.draft_copy)
        if gamma:
            assistant.generation_config.num_assistant_tokens = gamma
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            # Otherwise the assistant stops early at unlikely tokens.
            assistant.generation_config.assistant_confidence_threshold = 0.0
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return version, _generating(model, **arguments)


def _generating(model, **arguments) -> Decode:
    """Returns ``decode`` by transformers' ``generate`` with these arguments."""
    import torch

    @torch.inference_mode()
    def decode(ids: list[int], max_tokens: int) -> list[int]:
        source = torch.tensor([ids])
        outputs = model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
            **arguments,
        )
        # The start token comes first.
        return outputs[0, 1:].tolist()

    return decode


def openvino(workload: Workload) -> tuple[str, Decode]:
    """Loads an OpenVINO model with int8 weights, decoded by optimum-intel's ``generate``."""
    import openvino
    import optimum.intel
    import torch

    torch.set_num_threads(workload.threads)
    converted = Path(workload.target_copy).with_suffix(".openvino")
    if not converted.exists():
        _apart(_export, workload.target_copy, str(converted))
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(workload.threads)}
    model = optimum.intel.OVModelForSeq2SeqLM.from_pretrained(converted, ov_config=settings)
    return f"OpenVINO {openvino.__version__.partition('-')[0]}", _generating(model)


def _export(source: str, destination: str) -> None:
    """Exports to OpenVINO's format with weights rounded asymmetrically to int8 by column."""
    from optimum.intel import OVModelForSeq2SeqLM, OVWeightQuantizationConfig

    rounding = OVWeightQuantizationConfig(bits=8)
    model = OVModelForSeq2SeqLM.from_pretrained(
        source, export=True, compile=False, quantization_config=rounding
    )
    model.save_pretrained(destination)


def _apart(convert: Callable[[str, str], None], source: str, destination: str) -> None:
    """Converts in another process, so that its memory does not count for the decoding one."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        pool.submit(convert, source, destination).result()


def ctranslate2(workload: Workload, *, compute_type: str) -> tuple[str, Decode]:
    """Loads CTranslate2 with "float32" or "int8" weights; its tokens are ids as strings."""
    version, translator = translator_of(workload.target_copy, compute_type, workload.threads)

    def decode(ids: list[int], max_tokens: int) -> list[int]:
        (output,) = translated(translator, [ids], max_tokens)
        return output

    return version, decode


def translated(
    translator, inputs: list[list[int]], max_tokens: int, batch_size: int = 1
) -> list[list[int]]:
    """Returns CTranslate2's output ids of each input; the library sorts inputs by length."""
    results = translator.translate_batch(
        [list(map(str, ids)) for ids in inputs],
        beam_size=1,
        max_batch_size=batch_size,
        max_decoding_length=max_tokens,
        # 0 disables the default cut at 1024 source tokens.
        max_input_length=0,
        return_end_token=True,
    )
    return [list(map(int, result.hypotheses[0])) for result in results]


def translator_of(checkpoint: str, compute_type: str, threads: int):
    """Returns CTranslate2's version, and a translator of a Hugging Face checkpoint."""
    import ctranslate2

    converted = Path(checkpoint).with_suffix(".ctranslate2")
    if not converted.exists():
        _apart(_convert, checkpoint, str(converted))
    # Loading takes a team of threads, and decoding, in a thread of CTranslate2's own, another.
    # Where both are there, GNU's OpenMP finds more threads than processors and has them sleep
    # between the parts of a step: on two processors decoding then takes seven times as long.
    # The first team ends with the thread that it was made in.
    with ThreadPoolExecutor(1) as loading:
        translator = loading.submit(
            ctranslate2.Translator,
            str(converted),
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=threads,
        ).result()
    return f"CTranslate2 {ctranslate2.__version__}", translator


def _convert(source: str, destination: str) -> None:
    """Converts to CTranslate2's float32 format, which loading rounds to int8 if asked to."""
    from ctranslate2.converters import TransformersConverter

    class Ids:
        """Tokenizer for the converter, whose tokens are ids as strings."""

        # Id 2 is T5's unknown token.
        pad_token, eos_token, unk_token = str(PAD_ID), str(EOS_ID), "2"

        def __init__(self, number: int):
            self.get_vocab = lambda: {str(i): i for i in range(number)}
            self.convert_ids_to_tokens = str

    class Converter(TransformersConverter):
        """Reads the weights with transformers; names tokens by their ids."""

        def load_model(self, model_class, model_name_or_path, **kwargs):
            model = super().load_model(model_class, model_name_or_path, **kwargs)
            self._num_ids = model.config.vocab_size
            return model

        def load_tokenizer(self, tokenizer_class, model_name_or_path, **kwargs):
            return Ids(self._num_ids)

    Converter(source).convert(destination, quantization="float32")


def t5x(workload: Workload) -> tuple[str, Decode]:
    """Loads T5X's model with ``temperature_sample``; sources are padded to buckets as in ``ours``.

    T5X's parameters have this package's names and shapes (see ``tests/checkpoints``).
    """
    import jax.numpy as jnp
    import seqio
    import t5x
    from t5x import decoding, models
    from t5x.examples.t5 import network

    loaded = load(workload.target_copy, dtype="float32", vocabulary=workload.vocabulary)
    names = "vocab_size emb_dim num_heads num_encoder_layers num_decoder_layers head_dim mlp_dim"
    names = [*names.split(), "mlp_activations", "logits_via_embedding"]
    sizes = {name: getattr(loaded.config, name) for name in names}
    # Decoding uses only the vocabulary's end of sequence.
    vocabulary = seqio.PassThroughVocabulary(loaded.config.vocab_size, eos_id=EOS_ID)
    model = models.EncoderDecoderModel(
        module=network.Transformer(network.T5Config(dropout_rate=0.0, dtype=jnp.float32, **sizes)),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=None,
        decode_fn=decoding.temperature_sample,
    )
    targets = jnp.zeros((1, workload.max_decode_len), jnp.int32)
    greedy = {"temperature": 0.0, "topk": 0, "rescale_log_probs": True}

    @jax.jit
    def predict(params, sources, max_tokens):
        batch = {"encoder_input_tokens": sources, "decoder_input_tokens": targets}
        options = {**greedy, "max_decode_steps": max_tokens}
        return model.predict_batch_with_aux(params, batch, decoder_params=options)[0]

    def decode(ids: list[int], max_tokens: int) -> list[int]:
        source = np.full((1, bucket(len(ids), workload.max_source_len)), PAD_ID, np.int32)
        source[0, : len(ids)] = ids
        return np.asarray(predict(loaded.params, source, max_tokens))[0, :max_tokens].tolist()

    return f"T5X {getattr(t5x, '__version__', '(a checkout)')}, JAX {jax.__version__}", decode
