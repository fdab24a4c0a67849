"""The floor: what is counted, what is measured, and what follows from both."""

import doctest

import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments import floor
from spec_t5x.experiments.floor import DecodeBytes, Floor, ReadMeter, decode_bytes, usable_threads
from spec_t5x.models.t5 import T5Config

FLOAT = 4
CONFIG = T5Config(
    vocab_size=40,
    emb_dim=8,
    num_heads=2,
    head_dim=3,
    mlp_dim=5,
    num_encoder_layers=1,
    num_decoder_layers=2,
    mlp_activations=("gelu", "linear"),
    logits_via_embedding=False,
)
JOINED = CONFIG.num_heads * CONFIG.head_dim


def decoder_weights() -> int:
    """Numbers that a step reads, counted by hand."""
    attention = 4 * CONFIG.emb_dim * JOINED
    # Of the source's keys and values the encoder's call has the kernels.
    cross = 2 * CONFIG.emb_dim * JOINED
    gated = 3 * CONFIG.emb_dim * CONFIG.mlp_dim
    norms = 3 * CONFIG.emb_dim
    layers = CONFIG.num_decoder_layers * (attention + cross + gated + norms)
    output = CONFIG.emb_dim * CONFIG.vocab_size
    relative_positions = CONFIG.relpos_num_buckets * CONFIG.num_heads
    one_embedding = CONFIG.emb_dim
    return layers + CONFIG.emb_dim + output + relative_positions + one_embedding


def test_a_step_reads_its_weights_and_the_caches_in_use():
    reads = decode_bytes(CONFIG, [(5, 3), (7, 1)])
    # Positions of the source and of the text that the four steps attend to.
    attended = 3 * 5 + (1 + 2 + 3) + 7 + 1
    caches = 2 * CONFIG.num_decoder_layers * JOINED * attended
    assert reads.num_tokens == 4
    assert reads.decoder == FLOAT * (4 * decoder_weights() + caches)
    assert reads.step == round(reads.decoder / 4)


def test_the_encoder_is_read_once_for_each_input():
    once, longer = decode_bytes(CONFIG, [(5, 3)]), decode_bytes(CONFIG, [(5, 30)])
    assert once.encoder == longer.encoder > 0
    assert decode_bytes(CONFIG, [(5, 3), (5, 1)]).encoder == 2 * once.encoder


def make_floor(**changes) -> Floor:
    values = {
        "reads": DecodeBytes(num_tokens=10, encoder=4_000, decoder=20_000),
        "working_set": 2_000,
        "last_level_cache": 3_000,
        "threads": 2,
        "bytes_per_second": [1e6, 2e6, 1.5e6],
    }
    return Floor(**(values | changes))


def test_what_follows_from_the_best_bandwidth():
    measured = make_floor()
    assert measured.bandwidth == 2e6
    assert measured.step_seconds == pytest.approx(1e-3)
    assert measured.token_seconds == pytest.approx(1.2e-3)
    assert measured.to_dict()["step_seconds"] == measured.step_seconds


@pytest.mark.parametrize(
    ("cache", "expected"), [(3_000, True), (2_000, False), (1_000, False), (None, None)]
)
def test_whether_the_working_set_fits_into_the_cache(cache, expected):
    assert make_floor(last_level_cache=cache).in_cache is expected


def test_the_meter_counts_every_byte_of_every_pass(monkeypatch):
    # A clock that advances by a second whenever it is read: each timing takes one.
    seconds = iter(range(1000))
    monkeypatch.setattr(floor.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(floor, "_SECONDS", 3.0)
    meter = ReadMeter(1 << 20, 1)
    assert meter.num_bytes == 1 << 20
    # Three passes were found to fill the three seconds.
    assert meter.bytes_per_second() == 3 * (1 << 20)
    meter.close()


def test_both_ways_read_every_number_once(monkeypatch):
    part, seen = np.arange(10, dtype=np.float32), []
    monkeypatch.setattr(floor.np, "einsum", lambda _, *parts: seen.extend(np.concatenate(parts)))
    floor._side_by_side(part)
    assert seen == list(range(10))


def test_the_meter_parts_its_memory_among_threads():
    meter = ReadMeter(30_000, 3)
    assert meter.num_bytes == 30_000
    assert meter.bytes_per_second() > 0
    meter.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1 << 20, 0), "threads is 0"), ((4096, 2), "num_bytes is 4096")],
)
def test_a_meter_that_cannot_measure_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        ReadMeter(*arguments)


@pytest.mark.parametrize(("lengths", "message"), [([], "no lengths"), ([(4, 0)], "no output")])
def test_nothing_to_decode_is_refused(lengths, message):
    with pytest.raises(InputError, match=message):
        decode_bytes(CONFIG, lengths)


def test_threads_are_the_processors_of_this_process(monkeypatch):
    monkeypatch.setattr(floor.os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert usable_threads() == 3


def test_the_examples_of_the_module():
    assert doctest.testmod(floor).attempted == 1
    assert doctest.testmod(floor).failed == 0
