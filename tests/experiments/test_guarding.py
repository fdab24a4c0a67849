"""The guard's benchmark: its ratios, and a run with drafts that nobody would choose."""

import json

import pytest

from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.experiments import guarding
from spec_t5x.experiments.guarding import GuardingOptions, Row
from spec_t5x.generation import GenerateOptions

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_the_ratios_are_of_medians():
    row = Row(
        draft="random",
        gamma=4,
        temperature=0.0,
        batch_size=1,
        num_tokens=90,
        c=0.1,
        verification=1.4,
        prefill=0.5,
        block_efficiency=1.01,
        plain_share=0.9,
        plain_share_alone=0.8,
        plain_seconds=[1.0, 2.0, 7.0],
        unguarded_seconds=[3.0, 3.0, 3.0],
        guarded_seconds=[2.1, 2.1, 9.0],
        alone_seconds=[2.2, 2.2, 2.2],
    )
    kept = json.loads(json.dumps(guarding.to_dict([row])))["rows"][0]
    assert kept["unguarded"] == 1.5
    assert kept["guarded"] == pytest.approx(1.05)
    assert kept["guarded_alone"] == pytest.approx(1.1)
    assert "| random | 0.100 | 1.80 | 0.50 | 1.01 | 1.500 | 1.050 | 90% | 1.100 | 80% |" in (
        guarding.table([row])
    )


def test_a_hopeless_draft_is_measured(tiny_pair, tmp_path):
    data = tmp_path / "texts.tsv"
    data.write_text("0\tThe cat sleeps.\tx\n1\tWe are going.\ty\n", encoding="utf-8")
    options = GuardingOptions(data=str(data), num_inputs=2, repeats=1, drafts=("random",))
    models = Models(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    decoding = GenerateOptions(gamma=3, max_decode_len=10)
    (row,) = guarding.run(options, models=models, decoding=decoding)
    assert row.draft == "random"
    assert 2 <= row.num_tokens <= 20
    assert row.block_efficiency < 3
    assert 0 <= row.plain_share <= 1
    assert row.c >= 0 and row.verification >= 1 and row.prefill >= 0
    seconds = (row.plain_seconds, row.unguarded_seconds, row.guarded_seconds)
    assert all(len(column) == 1 and column[0] > 0 for column in seconds)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"drafts": ("bad",)}, "draft is 'bad': choose from own, uniform, random, as_target"),
        ({"start": -1.0}, "start is -1.0"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_options_out_of_range_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        GuardingOptions(data="texts.tsv", **wrong)


def test_plain_decoding_has_nothing_to_guard():
    with pytest.raises(InputError, match="gamma 0"):
        next(
            guarding.run(
                GuardingOptions(data="texts.tsv"),
                models=Models(),
                decoding=GenerateOptions(gamma=0),
            )
        )
