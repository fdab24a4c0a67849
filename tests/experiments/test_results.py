"""Tables and records of results."""

import dataclasses
import json

from spec_t5x.experiments import results
from spec_t5x.machine.description import free_memory, machine


@dataclasses.dataclass(frozen=True)
class Settings:
    data: str = "somewhere/pairs.tsv"
    # Rows name them.
    drafts: tuple = ("ngram:/home/me/tables",)
    repeats: int = 3


def test_a_table_leaves_out_columns_without_values():
    rows = [{"draft": "copy", "alpha": None}, {"draft": "ngram", "alpha": 0.25}]
    columns = {name: lambda row, name=name: row.get(name) for name in ("draft", "alpha", "c")}
    lines = results.table(columns, rows, "A note,", "and another.").splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:4:2]] == [
        ["draft", "alpha"],
        ["copy", "—"],
    ]
    assert lines[-1] == "A note, and another."


def test_a_record_has_machine_settings_and_rows_but_not_where_files_were(tmp_path):
    path = tmp_path / "new" / "figures.json"
    results.save(path, [{"speed_up": 1.5}], options=Settings())
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["machine"] == machine() and kept["rows"] == [{"speed_up": 1.5}]
    assert kept["options"] == {"data": "pairs.tsv", "repeats": 3}
    assert results.without_folder("ngram:/home/me/tables") == "ngram:tables"


def test_the_machine_is_described():
    found = machine()
    assert all(found[name] for name in ("platform", "num_devices", "processor", "threads", "jax"))
    assert free_memory() > 0
