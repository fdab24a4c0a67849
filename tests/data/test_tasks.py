"""seqio tasks over tab-separated files."""

import gzip
import itertools

import pytest

from spec_t5x.data.vocabulary import SentencePieceVocabulary, train_sentencepiece
from spec_t5x.errors import InputError

seqio = pytest.importorskip("seqio")

from spec_t5x.data.tasks import register_tsv_task  # noqa: E402

NUMBERS = ("eins", "zwei", "drei", "vier", "fünf", "sechs")
LINES = [f"tag\t{a} {b}\t {b} {a} " for a, b in itertools.product(NUMBERS, NUMBERS)]
COLUMNS = {"source_column": 1, "target_column": 2, "num_columns": 3}
_names = (f"tsv_test_{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    train_sentencepiece(LINES, folder / "spiece", 30)
    with gzip.open(folder / "train.tsv.gz", "wt", encoding="utf-8") as stream:
        stream.write("\n".join(LINES) + "\n")
    (folder / "dev.tsv").write_text("\n".join(LINES[:3]) + "\n", encoding="utf-8")
    return folder


def register(folder, train="train.tsv.gz", dev="dev.tsv", name=None, **options):
    return register_tsv_task(
        name or next(_names),
        str(folder / train),
        str(folder / dev),
        str(folder / "spiece.model"),
        **COLUMNS | options,
    )


def test_examples(folder):
    task = register(folder)
    lengths = {"inputs": 32, "targets": 32}
    dataset = task.get_dataset(lengths, "train", shuffle=False)
    examples = list(dataset.as_numpy_iterator())
    assert len(examples) == task.num_input_examples("train") == 36
    assert task.num_input_examples("validation") == 3
    vocabulary = SentencePieceVocabulary(folder / "spiece.model")
    example = examples[1]
    assert example["inputs"].tolist() == [*vocabulary.encode("eins zwei"), 1]
    assert example["targets"].tolist() == [*vocabulary.encode("zwei eins"), 1]
    assert example["targets_pretokenized"].decode() == "zwei eins"
    assert list(task.get_dataset(lengths, "validation", shuffle=False))


def test_extra_ids_agree_with_ours(folder):
    task = register(folder, extra_ids=7)
    theirs = task.output_features["inputs"].vocabulary
    ours = SentencePieceVocabulary(folder / "spiece.model", extra_ids=7)
    assert theirs.vocab_size == ours.vocab_size == 37
    text = "eins <extra_id_0> zwei <extra_id_6>"
    assert theirs.encode(text) == ours.encode(text)


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
