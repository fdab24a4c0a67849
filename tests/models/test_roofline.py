"""Operations and memory counted from shapes, against the compiler's count and known totals."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments.paper_tables import DRAFTS, TARGET
from spec_t5x.models.binding import abstract_params, expected_shapes
from spec_t5x.models.gpt import GPT, GPTConfig, GPTModel
from spec_t5x.models.roofline import decoder_step, encoder_call
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import SIZES
from spec_t5x.models.t5 import T5Config, Transformer

# Large enough that what is not a matrix product is a small share.
T5 = T5Config(
    vocab_size=2048,
    emb_dim=256,
    num_heads=4,
    head_dim=48,
    mlp_dim=512,
    num_encoder_layers=2,
    num_decoder_layers=3,
    mlp_activations=("gelu", "linear"),
    logits_via_embedding=False,
)
TIED = dataclasses.replace(T5, logits_via_embedding=True, mlp_activations=("relu",))
GPT_LIKE = GPTConfig(vocab_size=2048, emb_dim=256, num_heads=4, num_layers=3, mlp_dim=512)
BATCH, SOURCE, LENGTH = 2, 48, 64


def abstract_model(config):
    """A model whose parameters are shapes, which the checks of types take for a mistake."""
    params = abstract_params(config)
    if isinstance(config, T5Config):
        return T5Model(params, Transformer(config))
    return GPTModel(params, GPT(config))


def prefill(model, tokens):
    return model.prefill(tokens, LENGTH)


def compilers_count(function, *arguments) -> float:
    # Of the program as it is written, before any backend's rewriting.
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


def tokens(num: int):
    return jax.ShapeDtypeStruct((BATCH, num), jnp.int32)


@pytest.mark.parametrize(
    ("config", "new"),
    [(T5, 5), (TIED, 1), (GPT_LIKE, 5)],
    ids=["t5", "tied", "gpt"],
)
def test_operations_of_a_step_are_the_compilers(config, new, unchecked):
    model = abstract_model(config)
    cache = jax.eval_shape(prefill, model, tokens(SOURCE))
    counted = compilers_count(lambda m, c, t: m.score(c, t), model, cache, tokens(new))
    source = SOURCE if isinstance(config, T5Config) else 0
    ours = decoder_step(config, new, cache_length=LENGTH, source_length=source, batch=BATCH)
    # The compiler counts norms, softmax and activations too.
    assert ours.operations <= counted <= 1.03 * ours.operations
    # What is cached is read in whole.
    assert ours.cache_bytes == sum(leaf.size * 4 for leaf in jax.tree.leaves(cache.layers))


def test_operations_of_the_encoder_are_the_compilers(unchecked):
    counted = compilers_count(prefill, abstract_model(T5), tokens(SOURCE))
    ours = encoder_call(T5, SOURCE, batch=BATCH).operations
    assert ours <= counted <= 1.03 * ours


def num_parameters(config) -> int:
    return sum(map(math.prod, expected_shapes(config).values()))


def test_parameters_of_the_papers_language_models_without_their_tables():
    """GPT-like of 97M and 6M: section 4.2's sizes, where 8k tokens are embedded once."""
    target = num_parameters(GPTConfig(vocab_size=8000, max_length=512))
    draft = GPTConfig(vocab_size=8000, emb_dim=256, num_heads=4, num_layers=2, mlp_dim=1024)
    # 85M in twelve layers, 6.1M in the table; with an output layer of its own, 97.7M.
    assert target == pytest.approx(91.6e6, rel=0.01)
    untied = num_parameters(GPTConfig(vocab_size=8000, logits_via_embedding=False))
    assert round(untied / 1e6) in (97, 98)
    untied_draft = num_parameters(dataclasses.replace(draft, logits_via_embedding=False))
    assert round(untied_draft / 1e6) in (5, 6)


def test_what_t5_xxl_reads_and_computes():
    """The decoder's weights without the source's projections: 11 GB in bfloat16, as a
    compiled step on a TPU-v4 is found to read (``benchmarks/tpu_v4_xxl.json``)."""
    step = decoder_step(SIZES[TARGET], dtype="bfloat16")
    assert step.weight_bytes == pytest.approx(11.1e9, rel=0.01)
    # Each weight is multiplied once: two operations for its two bytes.
    assert step.operations == pytest.approx(step.weight_bytes, rel=0.001)
    # gamma + 1 tokens: the operations of as many steps, the memory of one.
    verification = decoder_step(SIZES[TARGET], 8, dtype="bfloat16")
    assert verification.operations == 8 * step.operations
    assert verification.weight_bytes == pytest.approx(step.weight_bytes, rel=1e-4)


def test_cost_ratios_of_the_papers_drafts_grow_with_their_size():
    """c_hat, and c if memory were all: well below the c that was measured for the larger."""
    lengths = {"cache_length": 128, "source_length": 128}
    target = SIZES[TARGET]
    theirs, ratios = decoder_step(target, **lengths), {}
    for name, size in DRAFTS.items():
        ours = decoder_step(SIZES[size], **lengths)
        operations = ours.operations / theirs.operations
        # Both are the ratio of the decoders' sizes, but for the caches.
        assert operations == pytest.approx(ours.bytes_read / theirs.bytes_read, rel=0.02)
        ratios[name] = round(operations, 3)
    assert ratios == {"small": 0.007, "base": 0.023, "large": 0.072}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decoder_step(T5, 0), "num_tokens is 0"),
        (lambda: decoder_step(T5, cache_length=-1), "cache_length is -1"),
        (lambda: decoder_step(T5, batch=0), "batch is 0"),
        (lambda: encoder_call(T5, 0), "source_length is 0"),
    ],
)
def test_what_cannot_be_counted_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
