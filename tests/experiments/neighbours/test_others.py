"""Other implementations: with our weights and ids they give our ids."""

import dataclasses
import threading

import jax
import pytest

from spec_t5x.experiments.neighbours.interface import Job, until_end
from spec_t5x.types import EOS_ID
from tests.experiments.neighbours.conftest import MAX_DECODE_LEN

pytestmark = pytest.mark.usefixtures("quick_compilation")


def check(decoder, inputs, outputs, can_encode: bool) -> None:
    """Ids, the first of them alone, and the encoder."""
    assert [decoder.decode(ids, MAX_DECODE_LEN) for ids in inputs] == outputs
    assert decoder.decode(inputs[0], 1) == outputs[0][:1]
    assert decoder.encode(inputs[0]) is can_encode


def test_some_outputs_end_and_some_do_not(outputs):
    """Else these tests would show less than they say."""
    assert len({EOS_ID in ids for ids in outputs}) == 2


def test_what_comes_after_the_end_is_cut():
    assert until_end([5, EOS_ID, 7, EOS_ID]) == [5, EOS_ID]
    assert until_end([5, 7]) == [5, 7]


@pytest.fixture(scope="module")
def with_transformers():
    pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("transformers", reason="needs transformers")
    from spec_t5x.experiments.neighbours import with_transformers

    return with_transformers


@pytest.mark.parametrize(
    "arguments",
    [{}, {"cache": "static"}, {"assistant": "gamma", "gamma": 3}, {"assistant": "own"}],
    ids=["eager", "static", "assisted", "assisted by its own settings"],
)
def test_transformers(with_transformers, job, inputs, outputs, arguments):
    check(with_transformers.make(job, **arguments), inputs, outputs, can_encode=True)


def test_an_assistant_drafts_as_many_as_it_is_told(with_transformers, job, inputs, monkeypatch):
    decoder = with_transformers.make(job, assistant="gamma", gamma=3)
    assistant, wanted = decoder._arguments["assistant_model"], []
    generate = assistant.generate

    def watched(*args, **kwargs):
        wanted.append(kwargs["max_new_tokens"])
        return generate(*args, **kwargs)

    monkeypatch.setattr(assistant, "generate", watched)
    decoder.decode(inputs[0], MAX_DECODE_LEN)
    # Fewer only where the text's end is near.
    assert max(wanted) == 3 and wanted[0] == 3


def test_transformers_version(with_transformers):
    assert "torch " in with_transformers.version()


@pytest.fixture(scope="module")
def with_ctranslate2(job):
    pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    pytest.importorskip("transformers", reason="needs transformers, which it converts with")
    from spec_t5x.experiments.neighbours import with_ctranslate2

    with_ctranslate2.prepare(job)
    return with_ctranslate2


def test_ctranslate2(with_ctranslate2, job, inputs, outputs):
    check(with_ctranslate2.make(job, compute_type="float32"), inputs, outputs, can_encode=False)


def test_ctranslate2_is_loaded_in_a_thread_that_ends(with_ctranslate2, job, monkeypatch):
    """Else its two teams of threads are in one another's way."""
    translator, loaded_in = with_ctranslate2.ctranslate2.Translator, []

    def watched(*args, **kwargs):
        loaded_in.append(threading.current_thread())
        return translator(*args, **kwargs)

    monkeypatch.setattr(with_ctranslate2.ctranslate2, "Translator", watched)
    with_ctranslate2.make(job, compute_type="float32")
    assert loaded_in != [threading.main_thread()]
    assert not loaded_in[0].is_alive()


def test_ctranslate2_with_int8_weights_decodes_ids(with_ctranslate2, job, inputs):
    decoder = with_ctranslate2.make(job, compute_type="int8")
    found = decoder.decode(inputs[0], MAX_DECODE_LEN)
    assert 1 <= len(found) <= MAX_DECODE_LEN and all(0 <= i < 128 for i in found)
    assert with_ctranslate2.version().startswith("CTranslate2 ")


def test_t5x(job, inputs, outputs):
    pytest.importorskip("t5x.models", reason="needs T5X")
    from spec_t5x.experiments.neighbours import with_t5x

    # T5X promotes ranks.
    with jax.numpy_rank_promotion("allow"):
        check(with_t5x.make(job), inputs, outputs, can_encode=True)
    assert with_t5x.version().startswith("T5X ")


def test_a_job_crosses_processes_unchanged(job):
    assert Job(**dataclasses.asdict(job)) == job
