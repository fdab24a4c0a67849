"""T5's tokenizer.json: ids and texts as of the SentencePiece model that it was made from."""

import json
import shutil

import hypothesis
import hypothesis.strategies as st
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from spec_t5x.checkpoints.storage.vocabularies import make_vocabulary
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.errors import InputError
from tests.conftest import ENGLISH, GERMAN

transformers = pytest.importorskip("transformers", reason="needs transformers")

EXTRA_IDS = 5
# The difference of float32 and float64 in the score of a text.
SAME_SCORE = 1e-3
# Pieces, words without one, marks that T5's normalisation changes, names of special ids, and of
# other programs' special ids. Not U+0085 and U+2581 (see the module).
PARTS = [
    *["The", "cat", "schl", "äft", "ß", "station", "q", "e", "0", "."],
    *["…", "ﬁ", "²", "é", "e\u0301", "中", "文", "😀", "\x00", "\u200b", "\ufeff", "⁇"],
    *[" ", "  ", "\t", "\n", "\u00a0", "\u3000", "\u2028"],
    *["<extra_id_0>", " <extra_id_4> ", "<extra_id_5>", "<extra_id_0", "_0>"],
    *["</s>", " </s> ", "<pad>", "<unk>", "<", ">", "/", "[PAD]", "<s>"],
]
texts = st.lists(st.sampled_from(PARTS) | st.sampled_from(ENGLISH + GERMAN), max_size=8).map(
    "".join
)


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    """Trains a SentencePiece model as T5's: NFKC, and one space for many."""
    prefix = tmp_path_factory.mktemp("spiece") / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH + GERMAN),
        model_prefix=str(prefix),
        vocab_size=150,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def by_transformers(spiece, theirs, **settings):
    """Copies a model to a directory, from which transformers makes a tokenizer."""
    shutil.copy(spiece, theirs / "spiece.model")
    (theirs / "config.json").write_text('{"model_type": "t5"}')
    values = {"tokenizer_class": "T5Tokenizer", **settings}
    (theirs / "tokenizer_config.json").write_text(json.dumps(values))
    return transformers.AutoTokenizer.from_pretrained(theirs)


@pytest.fixture(scope="module")
def written(tmp_path_factory, spiece):
    """Provides the file that transformers 5 writes for that model."""
    tokenizer = by_transformers(spiece, tmp_path_factory.mktemp("theirs"), extra_ids=EXTRA_IDS)
    # As a training leaves it: texts must not be cut, nor padded.
    tokenizer("a", truncation=True, max_length=3, padding="max_length")
    directory = tmp_path_factory.mktemp("written")
    tokenizer.save_pretrained(directory)
    assert not (directory / "spiece.model").exists()
    return directory / "tokenizer.json"


def changed(written, path, change):
    values = json.loads(written.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


def as_released_with_t5(values):
    """Moves the sentinels out of the model."""
    del values["model"]["vocab"][-EXTRA_IDS:]
    split, space = values["pre_tokenizer"]["pretokenizers"]
    old = {"type": "Metaspace", "replacement": space["replacement"], "add_prefix_space": True}
    values["pre_tokenizer"]["pretokenizers"] = [split, old]


def as_of_transformers_4(values):
    """Lets the normaliser handle spaces."""
    values["pre_tokenizer"] = values["pre_tokenizer"]["pretokenizers"][1]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    steps = [values["normalizer"], strip, spaces]
    values["normalizer"] = {"type": "Sequence", "normalizers": steps}


@pytest.fixture(scope="module", params=[None, as_released_with_t5, as_of_transformers_4])
def pair(spiece, written, tmp_path_factory, request):
    """Loads the SentencePiece model, and ``tokenizer.json`` of a release of transformers."""
    path = tmp_path_factory.mktemp("changed") / "tokenizer.json"
    path = changed(written, path, request.param) if request.param else written
    # Those of texts with sentinels, too, if they are read as transformers reads them.
    theirs = SentencePieceVocabulary(spiece, EXTRA_IDS, reads_sentinels=True)
    return theirs, UnigramVocabulary(path)


@pytest.fixture(scope="module")
def scores(spiece):
    model = sentencepiece_model_pb2.ModelProto.FromString(spiece.read_bytes())
    return [piece.score for piece in model.pieces] + [0.0] * EXTRA_IDS


@hypothesis.settings(max_examples=300)
@hypothesis.given(text=texts)
def test_ids_of_a_text(pair, scores, text):
    theirs, ours = (vocabulary.encode(text) for vocabulary in pair)
    if ours != theirs:
        # Either is a best segmentation: rounding chooses.
        first, second = ("".join(map(pair[0].piece, ids)) for ids in (theirs, ours))
        assert first == second
        assert abs(sum(scores[i] for i in theirs) - sum(scores[i] for i in ours)) < SAME_SCORE


@hypothesis.settings(max_examples=300)
@hypothesis.given(ids=st.lists(st.integers(-2, 160) | st.integers(0, 5), max_size=9))
def test_text_of_ids(pair, ids):
    theirs, ours = pair
    assert ours.decode(ids) == theirs.decode(ids)


def test_pieces(pair):
    theirs, ours = pair
    assert ours.vocab_size == theirs.vocab_size == 150 + EXTRA_IDS
    assert ours.extra_ids == theirs.extra_ids
    assert ours.fingerprint() == theirs.fingerprint()
    assert ours.word_starts().tolist() == theirs.word_starts().tolist()
    assert ours.encode("The cat <extra_id_0> sleeps.").count(154) == 1
    lines = [*ENGLISH, "", "</s>", " ", *GERMAN]
    assert ours.encode_batch(lines) == theirs.encode_batch(lines)


def test_t5s_own_model(shared_data, tmp_path):
    spiece = shared_data / "vocab" / "t5.spiece.model"
    by_transformers(spiece, tmp_path).save_pretrained(tmp_path / "written")
    theirs = SentencePieceVocabulary(spiece, 100)
    ours = make_vocabulary(str(tmp_path / "written" / "tokenizer.json"), None)
    assert ours.fingerprint() == theirs.fingerprint()
    lines = [*ENGLISH, *GERMAN, "Summarize:  a </s> <extra_id_0> b…", "中文 und ﬁn", "x²"]
    assert ours.encode_batch(lines) == theirs.encode_batch(lines)
    ids = [token for line in ours.encode_batch(lines) for token in line]
    assert ours.decode(ids) == theirs.decode(ids)


def test_save(written, tmp_path):
    UnigramVocabulary(written).save(tmp_path / "model")
    UnigramVocabulary(tmp_path / "model" / "tokenizer.json").save(tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == written.read_bytes()


def swapped(values):
    vocab = values["model"]["vocab"]
    vocab[0], vocab[1] = vocab[1], vocab[0]
    values["added_tokens"] = []


def added(values):
    token = values["added_tokens"][-1]
    values["added_tokens"].append(token | {"id": 155, "content": "<sep>"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (swapped, "begins with </s>, <pad>, <unk> and its unknown piece has id 2, T5's beg"),
        (lambda values: values["model"].update(unk_id=3), "its unknown piece has id 3"),
        (lambda values: values["model"].update(byte_fallback=True), "byte_fallback True"),
        (lambda values: values["model"].update(vocab=None), "is no Unigram model"),
        (lambda values: values["model"]["vocab"].pop(40), "is no Unigram model"),
        (lambda values: values.pop("model"), "is no Unigram model"),
    ],
)
def test_files_that_are_refused(written, tmp_path, change, expected):
    path = changed(written, tmp_path / "tokenizer.json", change)
    with pytest.raises(InputError, match=expected) as caught:
        UnigramVocabulary(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="no vocabulary at"):
        UnigramVocabulary(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("no JSON")
    with pytest.raises(InputError, match="is no Unigram model"):
        UnigramVocabulary(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["ﬁ\u0304", "The ﬁ\u0301 cat"])
def test_a_mark_after_a_rewritten_character_is_lost(written, spiece, text):
    """The ids are transformers': SentencePiece has an unknown piece for the mark."""
    theirs = transformers.AutoTokenizer.from_pretrained(written.parent)
    ours = UnigramVocabulary(written)
    assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert ours.encode(text) != SentencePieceVocabulary(spiece, EXTRA_IDS).encode(text)
    bare = "".join(c for c in text if c not in "\u0301\u0304")
    assert ours.encode(text) == ours.encode(bare)


def test_an_added_token(written, tmp_path):
    vocabulary = UnigramVocabulary(changed(written, tmp_path / "tokenizer.json", added))
    assert vocabulary.has_added and vocabulary.vocab_size == 150 + EXTRA_IDS + 1
    ids = vocabulary.encode("The<sep>cat </s>")
    assert ids[1] == 155 and 1 not in ids
    vocabulary.save(tmp_path / "saved")
    saved = UnigramVocabulary(tmp_path / "saved" / "tokenizer.json")
    assert saved.fingerprint() == vocabulary.fingerprint()
    assert not UnigramVocabulary(written).has_added


def as_of_mt5(values):
    """Makes the sentinels pieces that begin a word."""
    del values["added_tokens"][-EXTRA_IDS:]
    values["model"]["vocab"][-EXTRA_IDS:] = [[f"▁<extra_id_{i}>", 0.0] for i in range(EXTRA_IDS)]


def test_sentinels_that_are_pieces_are_no_extra_ids(written, tmp_path):
    """An export says how many transformers has to add."""
    vocabulary = UnigramVocabulary(changed(written, tmp_path / "tokenizer.json", as_of_mt5))
    assert vocabulary.extra_ids == 0
    assert vocabulary.vocab_size == 150 + EXTRA_IDS
