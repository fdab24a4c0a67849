"""Tokenizers of Hugging Face directories: ids and texts equal those of transformers' AutoTokenizer.

Each layout is a set of files as some release of transformers, or a person, leaves them.
"""

import json
import random
import shutil
import sys

import pytest
import sentencepiece
import tokenizers

from spec_t5x.checkpoints.huggingface.t5 import read_vocabulary
from spec_t5x.data.mapped_vocabulary import MappedVocabulary
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.errors import InputError
from tests.checkpoints.faults import message_of
from tests.conftest import ENGLISH, GERMAN

transformers = pytest.importorskip("transformers", reason="needs transformers")

EXTRA_IDS = 5
PIECES = 150
NEW = PIECES + EXTRA_IDS
T5_IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
OWN_IDS = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 1}
# Parts of the texts. No name of a special token, which is text here, is among them.
PARTS = [
    *["The", "cat", "schläft", "station", "q", "0", ".", "é", "²", "中", "▁"],
    *[" ", " ", " ", "  ", "\t", "\n", "\u00a0"],
    *["<hl>", "<sep>", "[x]", "wort", "Wort", "<extra_id_0>", "<extra_id_3>", "<HL>", "< sep>"],
]
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
ADDED, SPECIAL_MAP = "added_tokens.json", "special_tokens_map.json"
AS_IT_IS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def texts(count=150):
    chooser = random.Random(0)
    made = ["".join(chooser.choices(PARTS, k=chooser.randrange(1, 9))) for _ in range(count)]
    made += ["f(<extra_id_0>) x.", "<extra_id_1><extra_id_0>", "a <extra_id_04>", " <extra_id_2>"]
    return [*ENGLISH[:3], *GERMAN[:3], "", " ", "<hl>", "a <hl> b <hl>", "a<sep>b", *made]


@pytest.fixture(scope="module")
def spieces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spieces")
    models = {
        "t5": {},
        "own": {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1},
        "symbols": {"user_defined_symbols": ["<sep>", "<hl>"]},
        "other": {"max_sentencepiece_length": 3},
        "bytes": {"byte_fallback": True, "vocab_size": PIECES + 256},
        "pairs": {"model_type": "bpe"},
        "suffixes": {"treat_whitespace_as_suffix": True},
    }
    for name, options in models.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(ENGLISH + GERMAN),
            model_prefix=str(folder / name),
            normalization_rule_name="nmt_nfkc",
            minloglevel=2,
            **{
                "vocab_size": PIECES,
                "pad_id": 0,
                "eos_id": 1,
                "unk_id": 2,
                "bos_id": -1,
                **options,
            },
        )
    return {name: folder / f"{name}.model" for name in models}


def write(path, values):
    path.write_text(json.dumps(values, ensure_ascii=False))


def values_of(directory):
    return json.loads((directory / "config.json").read_text())


def make(
    directory,
    spieces,
    *,
    tokens=(),
    special=(),
    name="t5",
    by_5=True,
    spiece=None,
    kind="t5",
    ids=T5_IDS,
    extra_ids=EXTRA_IDS,
    without=(),
    change=None,
    settings=None,
    files=None,
    beside=None,
):
    """Lays out a directory.

    ``by_5`` is as transformers 5 saves it, with ``tokens`` and ``special`` ones added, and with a
    ``spiece``; otherwise it is a ``spiece.model``. ``settings`` are entries of SETTINGS,
    ``change`` edits a tokenizer.json, and ``beside`` are further models by the name of their file.
    """
    shutil.copy(spieces[name], directory / "spiece.model")
    write(directory / SETTINGS, {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids})
    write(directory / "config.json", {"model_type": "t5", "vocab_size": PIECES + 30, **T5_IDS})
    if by_5:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.add_tokens(list(tokens))
        if special:
            named = {"additional_special_tokens": list(special)}
            tokenizer.add_special_tokens(named, replace_extra_special_tokens=False)
        tokenizer.save_pretrained(directory)
        (directory / "spiece.model").unlink()
        if spiece:
            shutil.copy(spieces[spiece], directory / "spiece.model")
    if change:
        tokenizer = json.loads((directory / TOKENIZER).read_text())
        change(tokenizer)
        write(directory / TOKENIZER, tokenizer)
    found = json.loads((directory / SETTINGS).read_text())
    write(directory / SETTINGS, found | (settings or {}))
    write(directory / "config.json", values_of(directory) | {"model_type": kind, **ids})
    for file, values in (files or {}).items():
        write(directory / file, values)
    for file, other in (beside or {}).items():
        source = spieces[other]
        if file.endswith(".json"):
            (directory / other).mkdir()
            make(directory / other, spieces, name=other)
            source = directory / other / TOKENIZER
        shutil.copy(source, directory / file)
    for file in without:
        (directory / file).unlink()


def lower(values):
    steps = [values["normalizer"], {"type": "Lowercase"}]
    values["normalizer"] = {"type": "Sequence", "normalizers": steps}


def truncate(values):
    sizes = {"max_length": 512, "stride": 0}
    values["truncation"] = {"direction": "Right", "strategy": "LongestFirst", **sizes}


def of_version_4(values):
    """Sentinels beside the model, and older steps."""
    del values["model"]["vocab"][-EXTRA_IDS:]
    space = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    steps = [{"type": "WhitespaceSplit"}, space]
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    values["decoder"] = space


def decoder(*contents, first=NEW, **flags):
    """Returns ``added_tokens_decoder`` as version 4 writes it."""
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "special": False} | flags
    flags = {"normalized": not flags["special"], **flags}
    return {str(first + i): {"content": content, **flags} for i, content in enumerate(contents)}


def of_version_4_40(values, *more):
    """Lets the normaliser handle spaces."""
    values["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    steps = [values["normalizer"], *more, spaces]
    values["normalizer"] = {"type": "Sequence", "normalizers": steps}


def of_version_4_41(values):
    of_version_4_40(values, {"type": "Strip", "strip_left": False, "strip_right": True})


def without_type(values):
    """Leaves out the model's type, as the published T5 1.0 does."""
    del values["model"]["type"]


def pad(values):
    length = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    values["padding"] = length | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}


def no_frame(values):
    values["post_processor"] = None


def padding_before(values):
    frame = values["post_processor"]
    frame["single"].insert(0, {"SpecialToken": {"id": "<pad>", "type_id": 0}})
    frame["special_tokens"]["<pad>"] = {"id": "<pad>", "ids": [0], "tokens": ["<pad>"]}


def metaspace(values):
    values["pre_tokenizer"] = values["decoder"]


def flag_sentinels(values):
    for token in values["added_tokens"][3:]:
        token["single_word"] = True


def sentinels_that_are_pieces(values):
    """Leaves <extra_id_0> and <extra_id_1> to the model."""
    del values["added_tokens"][-2:]


NAMES = [f"<extra_id_{i}>" for i in range(EXTRA_IDS)]
SENTINELS = decoder(*reversed(NAMES), first=PIECES, special=True)
HL = decoder("<hl>", first=NEW + 1, special=True)
TOKENS = {"tokens": ["<sep>", "\n", "  "], "special": ["<hl>"]}
FLAGGED = [
    tokenizers.AddedToken("[x]", lstrip=True, rstrip=True, normalized=False),
    tokenizers.AddedToken("wort", single_word=True),
    tokenizers.AddedToken("<sep>", lstrip=True, special=True),
]
SEP = {"content": "<sep>", "lstrip": True, "rstrip": False, "normalized": False}
WHOLE_WORDS = {"added_tokens_decoder": decoder("wort", single_word=True)}
LISTED = {"additional_special_tokens": [*NAMES, "<hl>"]}

UNIGRAM, SPIECE, MAPPED = UnigramVocabulary, SentencePieceVocabulary, MappedVocabulary
PLAIN = {
    "spiece": (SPIECE, {"by_5": False}),
    "spiece of mT5": (SPIECE, {"by_5": False, "extra_ids": 0, "kind": "mt5"}),
    "spiece, sentinels listed": (
        SPIECE,
        {"by_5": False, "settings": {"additional_special_tokens": NAMES}},
    ),
    "spiece, sentinels added": (
        SPIECE,
        {
            "by_5": False,
            "settings": {"additional_special_tokens": [], "added_tokens_decoder": SENTINELS},
        },
    ),
    "json": (UNIGRAM, {}),
    "json and spiece": (SPIECE, {"spiece": "t5"}),
    "json and another spiece": (UNIGRAM, {"spiece": "other"}),
    "json of 2020": (UNIGRAM, {"change": without_type}),
    "json of 2020, as it is": (UNIGRAM, {"change": without_type, "settings": AS_IT_IS}),
    "other steps of mT5's class": (
        UNIGRAM,
        {"change": lower, "settings": {"tokenizer_class": "MT5TokenizerFast"}},
    ),
    "padded": (UNIGRAM, {"change": pad, "settings": AS_IT_IS}),
    "padded, own ids": (
        MAPPED,
        {"name": "own", "ids": OWN_IDS, "extra_ids": 0, "change": pad, "settings": AS_IT_IS},
    ),
    "other steps and spiece": (UNIGRAM, {"change": lower, "settings": AS_IT_IS, "spiece": "t5"}),
    "some sentinels and spiece": (
        UNIGRAM,
        {
            "change": sentinels_that_are_pieces,
            "settings": AS_IT_IS | {"extra_special_tokens": NAMES[2:]},
            "spiece": "t5",
        },
    ),
    "json of 4.40": (UNIGRAM, {"change": of_version_4_40}),
    "json of 4.41": (UNIGRAM, {"change": of_version_4_41}),
    "no end of sources": (MAPPED, {"change": no_frame, "settings": AS_IT_IS}),
    "T5 ends a source": (UNIGRAM, {"change": no_frame}),
    "T5 ends a source, own ids": (
        MAPPED,
        {"name": "own", "ids": OWN_IDS, "extra_ids": 0, "change": no_frame},
    ),
    "T5 has another frame": (UNIGRAM, {"change": padding_before}),
    "other steps": (UNIGRAM, {"change": lower, "settings": AS_IT_IS}),
    "added": (UNIGRAM, TOKENS),
    "added beside spiece": (UNIGRAM, TOKENS | {"spiece": "t5"}),
    "special alone": (UNIGRAM, {"special": ["<hl>"], "spiece": "t5"}),
    "flagged": (UNIGRAM, {"tokens": FLAGGED, "special": ["<hl>"]}),
    "pieces as tokens": (UNIGRAM, {"tokens": ["e"], "special": ["s"]}),
    "added to mT5": (UNIGRAM, TOKENS | {"extra_ids": 0, "kind": "mt5"}),
    "added and other steps": (UNIGRAM, TOKENS | {"change": lower, "settings": AS_IT_IS}),
    "added, as it is": (UNIGRAM, TOKENS | {"settings": AS_IT_IS}),
    "added to umT5": (UNIGRAM, TOKENS | {"kind": "umt5"}),
    "other steps of umT5": (UNIGRAM, {"change": lower, "kind": "umt5"}),
    "spaces that T5 has not, and spiece": (
        UNIGRAM,
        {"change": metaspace, "settings": AS_IT_IS, "spiece": "t5"},
    ),
    "flagged sentinels and spiece": (
        UNIGRAM,
        {"change": flag_sentinels, "settings": AS_IT_IS, "spiece": "t5"},
    ),
    "cut and padded": (UNIGRAM, TOKENS | {"change": truncate}),
    "own ids and tokens": (MAPPED, TOKENS | {"name": "own", "ids": OWN_IDS, "extra_ids": 0}),
    "a sentinel starts a text": (MAPPED, {"ids": T5_IDS | {"decoder_start_token_id": NEW - 1}}),
    "a piece starts a text": (MAPPED, {"ids": T5_IDS | {"decoder_start_token_id": 40}}),
    "own ids, as it is": (
        MAPPED,
        TOKENS | {"name": "own", "ids": OWN_IDS, "extra_ids": 0, "settings": AS_IT_IS},
    ),
}
# Layouts that transformers has to read.
OTHERS = {
    "steps that T5 leaves out": (UNIGRAM, {"change": lower}),
    # 100 sentinels are the default.
    "json without settings": (UNIGRAM, {"without": [SETTINGS]}),
    "json without sentinels": (
        UNIGRAM,
        {"extra_ids": 0, "settings": {"extra_ids": EXTRA_IDS, "extra_special_tokens": {}}},
    ),
    "flags of the settings": (
        UNIGRAM,
        {"tokens": ["wort"], "settings": AS_IT_IS | WHOLE_WORDS},
    ),
    "special by the settings": (
        UNIGRAM,
        {
            "tokens": ["<sep>"],
            "settings": AS_IT_IS | {"added_tokens_decoder": decoder("<sep>", special=True)},
        },
    ),
    "another token ends a source": (
        MAPPED,
        {"special": ["<hl>"], "settings": {"eos_token": "<hl>"}},
    ),
    "null for the sentinels": (
        UNIGRAM,
        {"by_5": False, "settings": {"additional_special_tokens": None}},
    ),
    "json of Gemma's class": (
        MAPPED,
        {"settings": {"tokenizer_class": "GemmaTokenizer"}},
    ),
    "spiece of BigBird's class": (
        MAPPED,
        {"by_5": False, "settings": {"tokenizer_class": "BigBirdTokenizer"}},
    ),
    "slow of 4": (
        UNIGRAM,
        {"by_5": False, "settings": {"added_tokens_decoder": SENTINELS | decoder("<sep>") | HL}},
    ),
    "slow of 3": (
        UNIGRAM,
        {"by_5": False, "files": {ADDED: {"<sep>": NEW, "<hl>": NEW + 1}, SPECIAL_MAP: LISTED}},
    ),
    "fast of 4": (
        UNIGRAM,
        {
            "tokens": ["<sep>"],
            "special": ["<hl>"],
            "spiece": "t5",
            "change": of_version_4,
            "settings": {
                "added_tokens_decoder": SENTINELS | decoder("<sep>") | HL,
                "tokenizer_class": "T5Tokenizer",
            },
        },
    ),
    "names without ids": (
        UNIGRAM,
        {
            "by_5": False,
            "files": {SPECIAL_MAP: LISTED | {"sep_token": SEP | {"single_word": False}}},
        },
    ),
    "names beside json": (
        UNIGRAM,
        {
            "tokens": ["[x]"],
            "files": {
                SPECIAL_MAP: LISTED | {"sep_token": "<sep>"},
                SETTINGS: {"tokenizer_class": "T5Tokenizer", "extra_ids": EXTRA_IDS},
            },
        },
    ),
    "settings without a token": (
        UNIGRAM,
        {"tokens": ["<sep>", "<hl>"], "settings": {"added_tokens_decoder": decoder("<sep>")}},
    ),
    "roles": (UNIGRAM, {"by_5": False, "settings": {"sep_token": "<sep>", "bos_token": "<s>"}}),
    "a token of the settings alone": (
        UNIGRAM,
        {"settings": {"added_tokens_decoder": decoder("<sep>")}},
    ),
    "special by name": (
        UNIGRAM,
        {"by_5": False, "settings": {"extra_special_tokens": {"highlight_token": "<hl>"}}},
    ),
    "special listed": (UNIGRAM, {"settings": {"extra_special_tokens": ["<hl>", "<sep>"]}}),
    # The other sentinels are pieces like any.
    "no sentinels listed": (
        UNIGRAM,
        {"by_5": False, "settings": {"additional_special_tokens": []}},
    ),
    "one sentinel listed": (
        UNIGRAM,
        {"by_5": False, "settings": {"extra_special_tokens": ["<extra_id_0>"]}},
    ),
    "no sentinels listed for mT5": (
        UNIGRAM,
        {"by_5": False, "kind": "mt5", "settings": {"extra_special_tokens": []}},
    ),
    "symbols of the spiece": (UNIGRAM, {"by_5": False, "name": "symbols"}),
    "other end": (MAPPED, {"by_5": False, "settings": {"eos_token": "<end>"}}),
    "own ids of the spiece": (
        MAPPED,
        {"by_5": False, "name": "own", "extra_ids": 0, "ids": OWN_IDS},
    ),
}
# Files that transformers reads in place of the usual one.
OTHERS |= {
    "tokenizer.model": (UNIGRAM, {"by_5": False, "beside": {"tokenizer.model": "other"}}),
    "a file of a release": (
        UNIGRAM,
        {
            "settings": {"fast_tokenizer_files": [TOKENIZER, "tokenizer.4.0.0.json"]},
            "beside": {"tokenizer.4.0.0.json": "other"},
        },
    ),
    "a file of a release alone": (
        UNIGRAM,
        {
            "settings": {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]},
            "beside": {"tokenizer.4.0.0.json": "other"},
            "without": [TOKENIZER],
        },
    ),
    "an absent file of a release": (
        SPIECE,
        {"settings": {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "spiece": "other"},
    ),
}
LAYOUTS = PLAIN | OTHERS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_texts_are_those_of_transformers(tmp_path, spieces, layout, monkeypatch):
    kind, options = LAYOUTS[layout]
    make(tmp_path, spieces, **options)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with monkeypatch.context() as patched:
        if layout in PLAIN:
            patched.setitem(sys.modules, "transformers", None)
        ours = read_vocabulary(tmp_path, values_of(tmp_path))
    assert type(ours) is kind
    for text in texts():
        if kind is SPIECE and "▁" in text:
            continue
        found = ours.framed(ours.encode(text))
        found = found if kind is SPIECE else ours.to_theirs(found)
        assert found == theirs(text).input_ids, (text, theirs.tokenize(text))
    chooser = random.Random(1)
    has_added = getattr(ours, "has_added", kind is MAPPED)
    last = len(theirs) if has_added else PIECES
    for _ in range(150):
        ids = chooser.choices(range(3, min(last, len(theirs))), k=chooser.randrange(1, 9))
        expected = theirs.decode(ids, skip_special_tokens=True)
        if has_added:
            assert ours.decode(ours.from_theirs(ids)) == expected
        else:
            # As SentencePiece has it: no text begins with white space.
            assert ours.decode(ids) == expected.lstrip(" ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tokens": ["\n", "\t"]}, "'\\n' and '\\t', which its normalisation makes equal"),
        (
            {"by_5": False, "settings": {"added_tokens_decoder": decoder("<sep>", first=NEW + 3)}},
            f"'<sep>' id {NEW + 3}, but",
        ),
        (
            {"by_5": False, "settings": {"added_tokens_decoder": {"5": 7}}},
            "describes no added tokens",
        ),
        (
            {"by_5": False, "settings": {"added_tokens_decoder": {"five": SEP}}},
            "describes no added tokens",
        ),
        (
            {"change": lambda values: values["model"].update(unk_id=7.5), "settings": AS_IT_IS},
            "cannot read the tokenizer in",
        ),
        (
            {"change": lambda values: values["added_tokens"][-1].update(id=NEW + 3)},
            "beyond the",
        ),
        (
            {"by_5": False, "kind": "umt5", "files": {ADDED: {"<sep>": NEW}}},
            "transformers cannot read the tokenizer of",
        ),
        ({"by_5": False, "settings": AS_IT_IS}, "transformers cannot read the tokenizer of"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path, spieces, options, expected):
    make(tmp_path, spieces, **options)
    assert expected in message_of(read_vocabulary, tmp_path, values_of(tmp_path))


@pytest.mark.parametrize(
    "model",
    [
        tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "The": 2}, unk_token="<unk>"),
        tokenizers.models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("The", -1.0)]),
        tokenizers.models.BPE({"<pad>": 0, "</s>": 1, "a": 2}, [], unk_token="<unk>"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_characters_without_an_unknown_token(tmp_path, model):
    """transformers fails, too."""
    tokenizers.Tokenizer(model).save(str(tmp_path / TOKENIZER))
    write(tmp_path / SETTINGS, AS_IT_IS)
    values = {"model_type": "t5", "vocab_size": 8, **T5_IDS}
    with pytest.raises(InputError, match="the tokenizer .* add an unknown token"):
        read_vocabulary(tmp_path, values).encode("The cat")


@pytest.mark.parametrize("name", ["t5", "bytes", "pairs", "suffixes"])
def test_what_transformers_leaves_out_of_a_spiece_is_named(tmp_path, spieces, name, caplog):
    """SentencePiece reads the file as it was trained; transformers 5, as T5's."""
    make(tmp_path, spieces, by_5=False, name=name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)

    def is_same():
        ours = read_vocabulary(tmp_path, values_of(tmp_path))
        return ours.framed(ours.encode("The cat 中.")) == theirs("The cat 中.").input_ids

    expected = f"transformers 5 reads {tmp_path / 'spiece.model'} without its bytes"
    assert is_same() == (name == "t5")
    assert [line.startswith(expected) for line in caplog.messages] == [True] * (name != "t5")
    # As the line says.
    theirs.save_pretrained(tmp_path)
    assert is_same()


def test_a_layout_that_transformers_has_to_read(tmp_path, spieces, monkeypatch):
    make(tmp_path, spieces, **OTHERS["slow of 4"][1])
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = message_of(read_vocabulary, tmp_path, values_of(tmp_path))
    assert "transformers is not installed: pip install 'spec_t5x[hf]'" in message


@pytest.mark.parametrize("answer", ["y", "n"])
def test_code_beside_a_tokenizer_is_neither_run_nor_asked_about(
    tmp_path, spieces, monkeypatch, answer
):
    names = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    make(tmp_path, spieces, by_5=False, settings=names | {"additional_special_tokens": ["<hl>"]})
    (tmp_path / "tok.py").write_text("raise SystemExit('code was run')")
    values = values_of(tmp_path)
    (tmp_path / "config.json").unlink()
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    assert "contains custom code" in message_of(read_vocabulary, tmp_path, values)
    assert not asked


BPE_TOKENS = ["<pad>", "</s>", "<unk>", "<s>", "<mask>"]
OTHER_ENDS = {"decoder_start_token_id": 0, "eos_token_id": 3, "pad_token_id": 0}
NAMED = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>"}
# As CodeT5's files have it.
MASK = {"content": "<mask>", "lstrip": True, "normalized": True, "__type": "AddedToken"}
ROBERTA = {"tokenizer_class": "RobertaTokenizer", "cls_token": "<s>", "sep_token": "</s>"}
ROBERTA |= NAMED | {"mask_token": MASK, "additional_special_tokens": NAMES}
CLASSES = {
    "BPE": (T5_IDS, AS_IT_IS | NAMED),
    "BPE that adds": (T5_IDS, AS_IT_IS | NAMED | {"additional_special_tokens": ["<hl>"]}),
    "BPE that cleans up": (T5_IDS, AS_IT_IS | NAMED | {"clean_up_tokenization_spaces": True}),
    "WordPiece": (T5_IDS, AS_IT_IS | NAMED),
    "CodeT5": ({**T5_IDS, "eos_token_id": 1}, ROBERTA),
    "CodeT5 of other ids": (OTHER_ENDS, ROBERTA),
    "FRED-T5": (OTHER_ENDS, NAMED | {"tokenizer_class": "GPT2Tokenizer"}),
    "BERT": (OTHER_ENDS, {"tokenizer_class": "BertTokenizer"}),
}


def write_tokenizer(directory, layout):
    """Writes the files of a tokenizer that is not Unigram."""
    lines = ENGLISH + GERMAN
    if layout == "BERT":
        words = sorted({word for line in lines for word in line.lower().split()})
        named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
        (directory / "vocab.txt").write_text("\n".join(named))
        return
    if layout == "WordPiece":
        made = tokenizers.BertWordPieceTokenizer(unk_token="<unk>")
        options = {"special_tokens": BPE_TOKENS}
    else:
        made = tokenizers.ByteLevelBPETokenizer()
        options = {"special_tokens": BPE_TOKENS}
    made.train_from_iterator(lines, vocab_size=400, show_progress=False, **options)
    if layout.startswith(("BPE", "WordPiece")):
        made._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        made.save(str(directory / TOKENIZER))
    else:
        made.save_model(str(directory))


@pytest.mark.parametrize("layout", CLASSES)
def test_tokenizers_that_are_not_unigram(tmp_path, layout, capfd, caplog):
    ids, settings = CLASSES[layout]
    write_tokenizer(tmp_path, layout)
    write(tmp_path / SETTINGS, settings)
    write(tmp_path / "config.json", {"model_type": "t5", "vocab_size": 512, **ids})
    capfd.readouterr()
    ours = read_vocabulary(tmp_path, values_of(tmp_path))
    assert capfd.readouterr() == ("", "") and type(ours) is MappedVocabulary
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in texts():
        found = ours.to_theirs(ours.framed(ours.encode(text)))
        assert found == theirs(text).input_ids, text
        expected = theirs.decode(found, skip_special_tokens=True)
        assert ours.decode(ours.encode(text)) == expected or layout in ("BERT", "WordPiece")
    for text in ("x = [ 1 , 2 ] .", "do n't"):
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ours.to_theirs(ids)) or "BPE" not in layout
    has_no_end = any("adds no special tokens to a source" in line for line in caplog.messages)
    assert has_no_end == (layout == "FRED-T5")


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("CodeT5", {"add_prefix_space": True}),
        ("FRED-T5", {"add_prefix_space": True}),
        ("BERT", {"do_lower_case": False}),
    ],
)
def test_a_class_makes_its_steps_of_settings(tmp_path, layout, settings, monkeypatch):
    """The steps in its tokenizer.json, which other classes use, change nothing."""
    ids, own = CLASSES[layout]
    write_tokenizer(tmp_path, layout)
    write(tmp_path / SETTINGS, own)
    write(tmp_path / "config.json", {"model_type": "t5", "vocab_size": 512, **ids})
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    before = read_vocabulary(tmp_path, values_of(tmp_path))
    write(tmp_path / SETTINGS, json.loads((tmp_path / SETTINGS).read_text()) | settings)
    ours = read_vocabulary(tmp_path, values_of(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in texts(20):
        assert ours.to_theirs(ours.framed(ours.encode(text))) == theirs(text).input_ids
    assert ours.encode(ENGLISH[0]) != before.encode(ENGLISH[0])
    # The file is used for what it is by another class, and by a umT5, which need no transformers.
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is not installed" in message_of(
        read_vocabulary, tmp_path, values_of(tmp_path)
    )
    umt5 = read_vocabulary(tmp_path, values_of(tmp_path) | {"model_type": "umt5"})
    write(tmp_path / SETTINGS, AS_IT_IS | settings)
    for other in (umt5, read_vocabulary(tmp_path, values_of(tmp_path))):
        assert other.encode(ENGLISH[0]) == before.encode(ENGLISH[0])


def test_gemmas_own_file_needs_no_transformers(tmp_path, monkeypatch):
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "T", "h", "e", "Th", "The", "▁The"]
    merges = [("T", "h"), ("Th", "e"), ("▁", "The")]
    theirs = transformers.GemmaTokenizer(
        {name: i for i, name in enumerate(names)}, merges, extra_special_tokens=["<hl>"]
    )
    theirs.save_pretrained(tmp_path)
    write(tmp_path / "config.json", {"model_type": "t5", "vocab_size": 32, **T5_IDS})
    monkeypatch.setitem(sys.modules, "transformers", None)
    ours = read_vocabulary(tmp_path, values_of(tmp_path))
    for text in ("The The", "  The<hl>Th e", "hé"):
        assert ours.to_theirs(ours.framed(ours.encode(text))) == theirs(text).input_ids


def test_a_tokenizer_in_the_directory_above(tmp_path, spieces):
    """A Trainer writes checkpoint-500 beside the tokenizer of the run."""
    make(tmp_path, spieces, special=["<hl>"])
    (inner := tmp_path / "checkpoint-500").mkdir()
    shutil.move(tmp_path / "config.json", inner)
    ours = read_vocabulary(inner, values_of(inner))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert all(ours.framed(ours.encode(text)) == theirs(text).input_ids for text in texts(20))
    # A model with another name is not of that run.
    other = inner.rename(tmp_path / "my-t5")
    assert read_vocabulary(other, values_of(other)) is None


def test_special_tokens_that_are_to_be_split(tmp_path, spieces, caplog):
    make(tmp_path, spieces, settings={"split_special_tokens": True})
    for _ in range(2):
        assert read_vocabulary(tmp_path, values_of(tmp_path)).encode("<extra_id_0>") == [154]
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / SETTINGS} sets split_special_tokens, which is not app")


def byt5(directory):
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.save_pretrained(directory)
    write(directory / "config.json", {"model_type": "t5", "vocab_size": 384, **T5_IDS})
    return tokenizer


@pytest.mark.parametrize("layout", ["saved by 5", "of 4", "in config", "without settings"])
def test_ids_and_texts_of_byt5(tmp_path, layout):
    theirs = byt5(tmp_path)
    if layout != "saved by 5":
        (tmp_path / ADDED).unlink()
        (tmp_path / SETTINGS).unlink()
    if layout == "of 4":
        names = [f"<extra_id_{i}>" for i in range(125)]
        write(tmp_path / SETTINGS, {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125})
        write(tmp_path / SPECIAL_MAP, {"additional_special_tokens": names})
    if layout == "in config":
        values = values_of(tmp_path) | {"tokenizer_class": "ByT5Tokenizer"}
        write(tmp_path / "config.json", values)
    if layout != "without settings":
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = read_vocabulary(tmp_path, values_of(tmp_path))
    assert isinstance(ours, ByteVocabulary)
    assert ours.vocab_size == 384 and ours.fingerprint() == ByteVocabulary().fingerprint()
    for text in [*texts(40), "<extra_id_0>", "a <extra_id_124> <extra_id_125>b<extra_id_07>"]:
        ids = theirs(text).input_ids
        assert ours.framed(ours.encode(text)) == ids
        assert ours.decode(ids[:-1]) == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_added_to_byt5(tmp_path):
    tokenizer = byt5(tmp_path)
    tokenizer.add_tokens(["<hl>"])
    tokenizer.save_pretrained(tmp_path)
    message = message_of(read_vocabulary, tmp_path, values_of(tmp_path))
    assert "adds token '<hl>' to ByT5's" in message
    # transformers adds the tokens that settings name, too.
    byt5(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"sep_token": "<sep>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    message = message_of(read_vocabulary, tmp_path, values_of(tmp_path))
    assert "adds token '<sep>' to ByT5's" in message
    values = values_of(tmp_path) | {"decoder_start_token_id": 2}
    expected = "is a ByT5 whose texts start with 2 and end with [1]: give one with T5's ids"
    assert expected in message_of(read_vocabulary, tmp_path, values)


def test_a_class_of_bytes_that_is_not_byt5s(tmp_path):
    """MyT5 has as many ids as ByT5, of other bytes."""
    byt5(tmp_path)
    (tmp_path / ADDED).unlink()
    write(tmp_path / SETTINGS, {"tokenizer_class": "MyT5Tokenizer"})
    assert read_vocabulary(tmp_path, values_of(tmp_path)) is None


@pytest.mark.parametrize("layout", ["spiece", "json", "added", "own ids of the spiece"])
def test_spaces_that_a_tokenizer_removes(tmp_path, spieces, layout):
    options = LAYOUTS[layout][1]
    make(tmp_path, spieces, **options, settings={"clean_up_tokenization_spaces": True})
    ours = read_vocabulary(tmp_path, values_of(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("The cat . sleep .", add_special_tokens=False).input_ids
    own = ours.from_theirs(ids) if isinstance(ours, MappedVocabulary) else ids
    found = ours.decode(own)
    assert found == theirs.decode(ids, skip_special_tokens=True)
    assert "sleep." in found or layout == "added"
    ours.cleans_up = False
    assert "sleep ." in ours.decode(own) or layout == "added"
