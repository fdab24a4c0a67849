"""Texts that are decoded: the package's, or the user's."""

import gzip

import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.reproduction import example_texts
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.labs.reproduction.example_texts import DESCRIPTIONS, SENTENCES, read
from spec_t5x.labs.reproduction.pairs import ENDE, LANGUAGE, SUMMARIES


@pytest.fixture
def data_dir(tmp_path):
    files = {
        "ende/dev.tsv.gz": "t\tHello.\tHallo.\nt\t \tLeer.\nt\tWell, good bye.\tTschüss.\n",
        "summarize/debian_dev.tsv.gz": "A long description.\ta synopsis\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_the_package_has_texts():
    assert len(set(SENTENCES)) == 60 and len(set(DESCRIPTIONS)) == 24
    # Long enough to be summarized, short enough for the packaged encoder with truncation.
    assert min(map(len, DESCRIPTIONS)) > 150
    assert read(SENTENCES, None, 3) == list(SENTENCES[:3])
    assert read(DESCRIPTIONS, None, 1000) == list(DESCRIPTIONS)
    example_texts.check(None)


def test_the_users_texts_are_read_without_empty_lines(data_dir):
    example_texts.check(data_dir)
    assert read(SENTENCES, data_dir, 5) == ["Hello.", "Well, good bye."]
    assert read(SENTENCES, data_dir, 1) == ["Hello."]
    assert read(DESCRIPTIONS, data_dir, 5) == ["A long description."]
    # A language model continues the first words.
    assert LANGUAGE.texts(ReproduceOptions(data_dir=data_dir), 2) == ["Hello.", "Well, good bye."]
    assert LANGUAGE.texts(ReproduceOptions(), 1) == ["Where did you"]
    # Each text begins with the prefix of its task.
    for pair, text in (
        (ENDE, "translate English to German: Hello."),
        (SUMMARIES, "summarize: A long description."),
    ):
        assert pair.texts(ReproduceOptions(data_dir=data_dir), 1) == [text]


def test_a_directory_without_the_files_is_refused(data_dir):
    (data_dir / "summarize/debian_dev.tsv.gz").unlink()
    with pytest.raises(InputError, match=r"holds no summarize/debian_dev\.tsv\.gz: give one that"):
        example_texts.check(data_dir)
    with pytest.raises(InputError, match="absent, which is not a directory: give one"):
        example_texts.check(data_dir / "absent")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quick": "yes"}, "quick is 'yes': give a value of type bool"),
        ({"data_dir": 3}, "data_dir is 3: give a value of type "),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_options_from_gin_are_checked(values, message):
    with pytest.raises(InputError, match=message):
        ReproduceOptions(**values)
