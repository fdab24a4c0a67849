"""The texts that are decoded: the package's, or the user's."""

import gzip

import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction import examples
from spec_t5x.experiments.reproduction.example_texts import DESCRIPTIONS, SENTENCES
from spec_t5x.experiments.reproduction.items import Setting


@pytest.fixture
def data_dir(tmp_path):
    files = {
        "ende/dev.tsv.gz": "t\tHello.\tHallo.\nt\t \tLeer.\nt\tGoodbye.\tTschüss.\n",
        "summarize/debian_dev.tsv.gz": "A long description.\ta synopsis\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_the_package_has_texts_of_its_own():
    assert len(set(SENTENCES)) == 60 and len(set(DESCRIPTIONS)) == 24
    # Long enough to be summarized, short enough for the packaged encoder with truncation.
    assert min(map(len, DESCRIPTIONS)) > 150
    texts = examples.sentences(Setting(), 3)
    assert texts.texts == SENTENCES[:3]
    assert texts.name == "3 English sentences that come with the package"
    assert examples.descriptions(Setting(), 1000).texts == DESCRIPTIONS
    examples.check(Setting())


def test_the_users_texts_are_read_without_empty_lines(data_dir):
    setting = Setting(data_dir=data_dir)
    examples.check(setting)
    texts = examples.sentences(setting, 5)
    assert texts.texts == ("Hello.", "Goodbye.")
    assert texts.name == "the first 2 English sentences of ende/dev.tsv.gz"
    assert examples.sentences(setting, 1).texts == ("Hello.",)
    assert examples.descriptions(setting, 5).texts == ("A long description.",)


def test_a_fingerprint_is_of_the_texts(data_dir):
    setting = Setting(data_dir=data_dir)
    fingerprints = {
        examples.sentences(Setting(), 2).fingerprint,
        examples.sentences(Setting(), 3).fingerprint,
        examples.sentences(setting, 2).fingerprint,
        examples.descriptions(setting, 2).fingerprint,
    }
    assert len(fingerprints) == 4
    assert examples.sentences(setting, 9).fingerprint == examples.sentences(setting, 2).fingerprint


def test_a_directory_without_the_files_is_refused(data_dir):
    (data_dir / "summarize/debian_dev.tsv.gz").unlink()
    with pytest.raises(InputError, match=r"holds no summarize/debian_dev\.tsv\.gz: give one that"):
        examples.check(Setting(data_dir=data_dir))
    with pytest.raises(InputError, match="absent, which is no directory: give one"):
        examples.check(Setting(data_dir=data_dir / "absent"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quick": "yes"}, "Setting.quick is 'yes': give True or False"),
        ({"seed": 1.5}, "Setting.seed is 1.5: give a whole number"),
        ({"seed": True}, "Setting.seed is True: give a whole number"),
        ({"data_dir": 3}, "Setting.data_dir is 3: give a text in quotes"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_setting_of_gins_is_checked(values, message):
    with pytest.raises(InputError, match=message):
        Setting(**values)
