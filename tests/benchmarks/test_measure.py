"""``measure.sh --tiny``: each kind of stage runs in full on a CPU, at small sizes."""

import json
import sys
import xml.etree.ElementTree as ElementTree

from tests.child import finished

STAGES = (
    *("flags", "laws_loops", "laws_kernels", "pairs", "steps_small", "table_2_small"),
    *("xl_drafted", "xl_int8", "closed_8"),
)


def test_every_kind_of_stage(tmp_path):
    command = ["bash", "scripts/gpu/measure.sh", "--tiny", tmp_path, *STAGES]
    result = finished(*command, PYTHON=sys.executable, JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr
    flags = json.loads((tmp_path / "flags.json").read_text())
    assert [each["status"] for each in flags.values()] == [0] * 4
    for laws in ("laws_loops", "laws_kernels"):
        (suite,) = ElementTree.parse(tmp_path / f"{laws}.json").getroot()
        counts = [int(suite.get(name)) for name in ("errors", "failures")]
        assert counts == [0, 0] and int(suite.get("tests")) > 50
    lines = [json.loads(line) for line in (tmp_path / "pairs.json").read_text().splitlines()]
    compared = [line["comparison"] for line in lines if "comparison" in line]
    assert len(compared) == 4
    kept = json.loads((tmp_path / "table_2_small.json").read_text())
    # A CPU does not tell its memory.
    assert kept["peak_memory_bytes"] is None
    assert [row["gamma"] for row in kept["rows"]] == [7, 7, 5, 5]
    assert all(row["plain_compile_seconds"] >= 0 for row in kept["rows"])
    assert json.loads((tmp_path / "xl_int8.json").read_text())["weights"] == "int8"
    kept = json.loads((tmp_path / "xl_drafted.json").read_text())
    both = [(0, "XLA"), (4, "XLA"), (0, "contrib/gpu"), (4, "contrib/gpu")]
    assert [(row["gamma"], row["by"]) for row in kept["rows"]] == both
    assert all(row["tokens_per_second"] > 0 for row in kept["rows"])
    assert all(1 <= row["block_efficiency"] <= 4 for row in kept["rows"])
    rows = json.loads((tmp_path / "steps_small.json").read_text())["rows"]
    # A CPU has no kernels on a stream of a GPU.
    assert [(row["by"], row["kernels"]) for row in rows] == [("XLA", []), ("contrib/gpu", [])]
    rows = json.loads((tmp_path / "closed_8.json").read_text())["rows"]
    assert [(row["gamma"], row["way"]) for row in rows] == [
        *((0, "batches"), (0, "slots"), (4, "batches"), (4, "slots"))
    ]
    assert {row["same_outputs"] for row in rows} == {4}
