"""Plain and speculative texts compared."""

import dataclasses

import jax
import pytest

from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.labs.benchmark import comparison as comparison_lib
from spec_t5x.labs.benchmark.comparison import compare, without_open
from spec_t5x.labs.benchmark.step_times import StepTimes
from tests.generation.cases import GREEDY, TEXTS, assert_same, options, token_logits

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TIMES = StepTimes(target=4.0, draft=1.0, verification=6.0)


@pytest.fixture(scope="module")
def comparison(generator):
    return compare(generator, TEXTS[:3], options(batch_size=2), repeats=2)


def test_comparison_finds_the_texts_identical_and_counts_them(comparison, greedy_alone):
    assert comparison.identical is True
    assert comparison.divergences == []
    assert_same(comparison.outputs, [greedy_alone[text] for text in TEXTS[:3]])
    outputs = [greedy_alone[text][0] for text in TEXTS[:3]]
    assert (comparison.num_inputs, comparison.gamma, comparison.temperature) == (3, 3, 0.0)
    num_tokens = sum(len(g.output_ids) for g in outputs)
    assert comparison.plain_tokens == comparison.speculative_tokens == num_tokens
    calls = sum(g.target_calls for g in outputs)
    assert comparison.target_calls == calls
    assert comparison.block_efficiency == pytest.approx(num_tokens / calls)
    assert 0 < comparison.alpha < 1


def test_a_divergence_is_reported_with_its_place_and_margin(generator, greedy_alone, monkeypatch):
    """Plain decoding that cannot say one of the tokens replaces a broken loop."""
    ids = {text: greedy_alone[text][0].output_ids for text in TEXTS}
    token = ids["My sister"][4]
    expected = {text: ids[text].index(token) for text in TEXTS if token in ids[text]}
    assert 0 < len(expected) < len(TEXTS)
    params = jax.tree.map(lambda leaf: leaf, generator.target.params)
    kernel = params["decoder"]["logits_dense"]["kernel"]
    params["decoder"]["logits_dense"]["kernel"] = kernel.at[:, token].set(0.0)
    target = generator.target.with_params(params)
    plain = dataclasses.replace(generator, target=target, draft=None)

    monkeypatch.setattr(Generator, "plain", lambda self: plain)
    monkeypatch.setattr(comparison_lib, "measure_step_times", lambda *_, **__: TIMES)
    comparison = compare(generator, TEXTS, options(batch_size=2), repeats=1)
    assert comparison.identical is False
    assert {d.input: d.position for d in comparison.divergences} == expected
    for divergence in comparison.divergences:
        assert divergence.speculative_token == token
        prefix = ids[divergence.input][: divergence.position]
        source = generator.tokenize(divergence.input, GREEDY)
        logits = token_logits(target, source, [*prefix, token])[-1]
        assert divergence.plain_token == logits.argmax()
        margin = logits.max() - logits[token]
        assert margin > 0
        assert divergence.margin == pytest.approx(margin, abs=1e-3)


def test_a_checkpoints_settings_that_the_options_exclude_are_not_made_options():
    of_checkpoint = {"max_decode_len": 5, "min_decode_len": 7}
    shorter = without_open(options(max_decode_len=None, gamma=5), of_checkpoint)
    assert (shorter.max_decode_len, shorter.min_decode_len) == (5, 5)
    with pytest.raises(InputError, match="gamma is 9 and max_decode_len 5: give"):
        without_open(options(max_decode_len=None, gamma=9), of_checkpoint)
    prefixed = without_open(options(output_prefix="a"), {"forced_bos_token_id": 7})
    assert prefixed.settled({"forced_bos_token_id": 7})["forced_bos_token_id"] == 7
