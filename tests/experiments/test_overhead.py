"""The overhead of an iteration: what is subtracted from what, and a run."""

import json

import pytest

from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.experiments import overhead
from spec_t5x.experiments.overhead import OverheadOptions, Row
from spec_t5x.generation import GenerateOptions

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROW = Row(
    temperature=1.0,
    top_k=40,
    top_p=0.0,
    batch_size=8,
    gamma=4,
    verifier="block",
    iteration=[2.0, 2.2, 9.0],
    networks=[1.9, 2.0, 9.0],
    proposal=[0.4, 0.5, 0.6],
    verification=[1.5, 1.3, 1.5],
    plain_step=[1.25, 1.25, 1.25],
    target_call=[1.0, 1.0, 1.0],
)


def test_the_overhead_is_what_drafts_and_verification_leave_over():
    """Medians 2.2 and 2 leave .2; a plain step of 1.25 has .25 beside its call."""
    assert ROW.overhead == pytest.approx(0.2)
    assert ROW.share == pytest.approx(0.2 / 2.2)
    assert ROW.plain_share == pytest.approx(0.2)
    low, high = ROW.share_range
    assert low == pytest.approx(0.1 / 2 / 2)
    assert high == pytest.approx((0.1 / 2 + 0.2 / 2.2) / 2)


def test_the_table_says_what_was_sampled_from():
    line = overhead.table([ROW]).splitlines()[2]
    assert line.startswith("| 8 | 1 | 40 | — | 4 | 2.200 | 2.000 | 0.200 | 9.1% |")
    assert json.loads(json.dumps(overhead.to_dict([ROW])))["rows"][0]["share"] == ROW.share


def test_iterations_drafts_and_verifications_are_measured(tiny_pair):
    options = OverheadOptions(
        distributions=((1.0, 0, 0.9),), batch_sizes=(2,), source_len=5, repeats=2
    )
    models = Models(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    decoding = GenerateOptions(gamma=2, max_decode_len=12)
    (row,) = overhead.run(options, models=models, decoding=decoding)
    assert row.batch_size == 2 and row.top_p == 0.9 and row.gamma == 2
    for times in (
        row.iteration,
        row.networks,
        row.proposal,
        row.verification,
        row.plain_step,
        row.target_call,
    ):
        # On a busy machine what is subtracted may leave nothing of one timing of a toy.
        assert len(times) == 2 and max(times) > 0


@pytest.mark.parametrize(
    ("decoding", "message"),
    [({"gamma": 0}, "gamma is 0"), ({"gamma": 2, "verifier": "tree"}, "verifier is 'tree'")],
)
def test_what_is_no_chain_of_drafts_is_refused(tiny_pair, decoding, message):
    models = Models(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    with pytest.raises(InputError, match=message):
        next(overhead.run(OverheadOptions(), models=models, decoding=GenerateOptions(**decoding)))


def test_options_out_of_range_are_refused():
    with pytest.raises(InputError, match="a batch size is 0"):
        OverheadOptions(batch_sizes=(0,))
    with pytest.raises(InputError, match="temperature is -1"):
        OverheadOptions(distributions=((-1.0, 0, 0.0),))
