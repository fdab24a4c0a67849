"""What gamma auto is worth: its ratios, and a run with a draft and a hopeless one."""

import json

import pytest

from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.experiments import pacing
from spec_t5x.experiments.pacing import PacingOptions, Row
from spec_t5x.generation import GenerateOptions

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_the_speed_ups_are_of_medians():
    row = Row(
        draft="random",
        batch_size=8,
        temperature=0.0,
        costs=(1.0, 1.25, 1.5),
        prefill=0.5,
        plain_share=0.9,
        limit=1.5,
        plain_seconds=[1.0, 2.0, 7.0],
        auto_seconds=[2.5, 2.5, 9.0],
        fixed_seconds={2: [4.0, 4.0, 4.0]},
    )
    kept = json.loads(json.dumps(pacing.to_dict([row])))["rows"][0]
    assert kept["auto"] == pytest.approx(0.8)
    assert kept["fixed"]["2"] == 0.5
    line = "| random | 8 | **0.80** | 0.50 | 90% | 1.5 | 1.25, 1.50 | 0.5 |"
    assert line in pacing.table([row])


def test_every_draft_is_measured_at_every_batch_size(tiny_pair, tmp_path):
    data = tmp_path / "texts.tsv"
    data.write_text("0\tThe cat sleeps.\tx\n1\tWe are going.\ty\n", encoding="utf-8")
    options = PacingOptions(
        data=str(data),
        num_inputs=2,
        repeats=1,
        drafts=("own", "random"),
        batch_sizes=(2,),
        gammas=(2,),
    )
    models = Models(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    decoding = GenerateOptions(max_decode_len=10)
    seen = []
    rows = list(
        pacing.run(options, lambda *told: seen.append(told), models=models, decoding=decoding)
    )
    assert [(row.draft, row.batch_size) for row in rows] == [("own", 2), ("random", 2)]
    assert [told[0] for told in seen] == [0, 1]
    for row in rows:
        assert 0 <= row.plain_share <= 1
        times = (row.plain_seconds, row.auto_seconds, row.fixed_seconds[2])
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times)
    # The tests' costs are those of a draft that pays if it is right; random weights are not.
    assert rows[1].plain_share > rows[0].plain_share


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gammas": (0,)}, "gammas hold 0"),
        ({"num_inputs": 0}, "num_inputs is 0"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_options_out_of_range_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        PacingOptions(data="texts.tsv", **wrong)


def test_a_beam_search_has_no_pace():
    decoding = GenerateOptions(beams=2)
    with pytest.raises(InputError, match="beams is 2"):
        next(pacing.run(PacingOptions(data="texts.tsv"), models=Models(), decoding=decoding))
