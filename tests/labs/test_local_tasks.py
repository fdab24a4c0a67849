"""seqio tasks over local files, tab-separated or of JSON lines."""

import gzip
import itertools
import json

import pytest

from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.metrics import METRICS
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece

seqio = pytest.importorskip("seqio")

from spec_t5x.labs.local_tasks import register_jsonl_task, register_tsv_task  # noqa: E402

NUMBERS = ("eins", "zwei", "drei", "vier", "fünf", "sechs")
LINES = [f"tag\t{a} {b}\t {b} {a} " for a, b in itertools.product(NUMBERS, NUMBERS)]
COLUMNS = {"source_column": 1, "target_column": 2, "num_columns": 3}
LENGTHS = {"inputs": 32, "targets": 32}
_names = (f"local_task_{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    train_sentencepiece(LINES, folder / "spiece", 30)
    with gzip.open(folder / "train.tsv.gz", "wt", encoding="utf-8") as stream:
        stream.write("\n".join(LINES) + "\n")
    (folder / "dev.tsv").write_text("\n".join(LINES[:3]) + "\n", encoding="utf-8")
    return folder


def register(folder, dev="dev.tsv", **options):
    files = (str(folder / name) for name in ("train.tsv.gz", dev, "spiece.model"))
    return register_tsv_task(next(_names), *files, **COLUMNS | options)


def examples_of(task, split):
    return list(task.get_dataset(LENGTHS, split, shuffle=False).as_numpy_iterator())


def test_examples(folder):
    task = register(folder, extra_ids=7)
    examples = examples_of(task, "train")
    assert len(examples) == task.num_input_examples("train") == 36
    assert len(examples_of(task, "validation")) == task.num_input_examples("validation") == 3
    ours = SentencePieceVocabulary(folder / "spiece.model", extra_ids=7)
    example = examples[1]
    assert example["inputs"].tolist() == [*ours.encode("eins zwei"), 1]
    assert example["targets"].tolist() == [*ours.encode("zwei eins"), 1]
    assert example["targets_pretokenized"].decode() == "zwei eins"
    theirs = task.output_features["inputs"].vocabulary
    assert theirs.vocab_size == ours.vocab_size == 37
    text = "eins <extra_id_0> zwei <extra_id_6>"
    assert theirs.encode(text) == ours.encode(text)


def test_json_lines_of_articles(folder):
    rows = [("Eins .\nZwei .", "eins"), ("zwei", "zwei zwei")]
    path = folder / "pairs.jsonl"
    names = "article", "highlights"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    given = str(path), str(path), str(folder / "spiece.model")
    task = register_jsonl_task(next(_names), *given)
    assert task.metric_fns == [METRICS["rouge"]] and task.num_input_examples("validation") == 2
    for example, (source, target) in zip(examples_of(task, "validation"), rows, strict=True):
        assert example["inputs_pretokenized"].decode() == f"summarize: {source}"
        assert example["targets_pretokenized"].decode() == target


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\tc\na\tb\n", r"bad\.tsv, line 2: 2 columns, not 3"),
        (None, r"no file .*bad\.tsv"),
    ],
    ids=["columns", "absent"],
)
def test_a_file_that_cannot_be_read_is_refused_at_once(folder, content, message):
    path = folder / "bad.tsv"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        register(folder, dev="bad.tsv")
