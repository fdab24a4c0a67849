"""Tokenizers of Hugging Face directories: ids and texts equal those of transformers' AutoTokenizer.

Each layout is a set of files as some release of transformers, or a person, leaves them.
"""

import json
import random
import shutil

import pytest
import sentencepiece
import tokenizers

from spec_t5x.checkpoints.huggingface.t5 import read_vocabulary
from spec_t5x.data.mapped_vocabulary import MappedVocabulary
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from tests.checkpoints.faults import message_of
from tests.conftest import ENGLISH, GERMAN

transformers = pytest.importorskip("transformers", reason="needs transformers")

EXTRA_IDS = 5
PIECES = 150
T5_IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
OWN_IDS = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 1}
# What texts are made of. Sentinels are words of their own, and no name of a special token, which is
# text here, is among them.
PARTS = [
    *["The", "cat", "schläft", "station", "q", "0", ".", "é", "²", "中", "▁"],
    *[" ", " ", " ", "  ", "\t", "\n", "\u00a0"],
    *["<hl>", "<sep>", "[x]", "wort", "Wort", " <extra_id_0> ", " <extra_id_3> ", "<HL>", "< sep>"],
]
AddedToken = tokenizers.AddedToken
# As ``add_tokens`` and ``add_special_tokens`` take them.
PLAIN = ["<sep>", "\n", "  "]
SPECIAL = ["<hl>"]
FLAGGED = [
    AddedToken("[x]", lstrip=True, rstrip=True, normalized=False),
    AddedToken("wort", single_word=True),
    AddedToken("<sep>", lstrip=True, special=True),
]


def texts(count=150):
    chooser = random.Random(0)
    made = ["".join(chooser.choices(PARTS, k=chooser.randrange(1, 9))) for _ in range(count)]
    return [*ENGLISH[:3], *GERMAN[:3], "", " ", "<hl>", "a <hl> b <hl>", "a<sep>b", *made]


def train(prefix, **options):
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH + GERMAN),
        model_prefix=str(prefix),
        vocab_size=PIECES,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
        **special,
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def spieces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spieces")
    own = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
    return {
        "t5": train(folder / "t5"),
        "own": train(folder / "own", **own),
        "symbols": train(folder / "symbols", user_defined_symbols=["<sep>", "<hl>"]),
        "other": train(folder / "other", max_sentencepiece_length=3),
    }


def write_json(path, values):
    path.write_text(json.dumps(values, ensure_ascii=False))


def config(directory, kind="t5", ids=T5_IDS, rows=PIECES + 30):
    values = {"model_type": kind, "vocab_size": rows, **ids}
    write_json(directory / "config.json", values)


def spiece_only(directory, spieces, name="t5", extra_ids=EXTRA_IDS, **settings):
    shutil.copy(spieces[name], directory / "spiece.model")
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids, **settings}
    write_json(directory / "tokenizer_config.json", settings)
    config(directory)


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, **flags}


NEW = PIECES + EXTRA_IDS


def decoder(*contents, first=NEW, **flags):
    """``added_tokens_decoder`` as version 4 writes it."""
    special = {"special": False, "normalized": True, **flags}
    return {str(first + i): token(content, **special) for i, content in enumerate(contents)}


SENTINELS = {
    str(NEW - 1 - i): token(f"<extra_id_{i}>", special=True, normalized=False)
    for i in range(EXTRA_IDS)
}


def saved(directory, spieces, tokens=(), special=(), name="t5", keeps_spiece=False, **settings):
    """As transformers 5 saves a tokenizer that tokens were added to."""
    before = directory / "before"
    before.mkdir()
    spiece_only(before, spieces, name, **settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(before)
    tokenizer.add_tokens(list(tokens))
    if special:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": list(special)}, replace_extra_special_tokens=False
        )
    tokenizer.save_pretrained(directory)
    assert (directory / "tokenizer.json").is_file()
    if keeps_spiece:
        shutil.copy(spieces[name], directory / "spiece.model")
    shutil.rmtree(before)
    config(directory)


def edit(directory, name, change):
    path = directory / name
    values = json.loads(path.read_text())
    change(values)
    write_json(path, values)


def plain_json(directory, spieces):
    saved(directory, spieces)


def plain_both(directory, spieces):
    saved(directory, spieces, keeps_spiece=True)


def plain_spiece(directory, spieces):
    spiece_only(directory, spieces)


def plain_spiece_of_mt5(directory, spieces):
    spiece_only(directory, spieces, extra_ids=0)
    config(directory, "mt5")


def plain_without_settings(directory, spieces):
    saved(directory, spieces)
    (directory / "tokenizer_config.json").unlink()


def lower(directory, **settings):
    """The tokenizer.json makes all letters small."""

    def change(values):
        steps = [values["normalizer"], {"type": "Lowercase"}]
        values["normalizer"] = {"type": "Sequence", "normalizers": steps}

    edit(directory, "tokenizer.json", change)
    edit(directory, "tokenizer_config.json", lambda values: values.update(settings))


def steps_that_t5_leaves_out(directory, spieces):
    saved(directory, spieces)
    lower(directory)


def steps_as_they_are(directory, spieces):
    saved(directory, spieces)
    lower(directory, tokenizer_class="PreTrainedTokenizerFast")


def steps_and_tokens(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL)
    lower(directory, tokenizer_class="PreTrainedTokenizerFast")


def another_spiece_beside_it(directory, spieces):
    saved(directory, spieces)
    shutil.copy(spieces["other"], directory / "spiece.model")


def added_in_5(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL)


def added_in_5_beside_spiece(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL, keeps_spiece=True)


def special_alone_in_5(directory, spieces):
    saved(directory, spieces, special=SPECIAL, keeps_spiece=True)


def white_space_in_5(directory, spieces):
    saved(directory, spieces, ["\n", "  ", "   "])


def flagged_in_5(directory, spieces):
    saved(directory, spieces, FLAGGED, SPECIAL)


def a_piece_in_5(directory, spieces):
    """Tokens that the model has as pieces: no new ids."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(spieces["t5"]))
    assert pieces.piece_to_id("e") > 2 and pieces.piece_to_id("s") > 2
    saved(directory, spieces, ["e"], ["s"])


def added_in_5_to_mt5(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL, extra_ids=0)
    config(directory, "mt5")


def added_in_5_without_settings(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL)
    (directory / "tokenizer_config.json").unlink()


def added_in_5_as_it_is(directory, spieces):
    """Of a class that takes the file as it is."""
    saved(directory, spieces, PLAIN, SPECIAL)
    change = {"tokenizer_class": "PreTrainedTokenizerFast"}
    edit(directory, "tokenizer_config.json", lambda values: values.update(change))


def added_to_umt5(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL)
    config(directory, "umt5")


def cut_and_padded_in_5(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL)

    def change(values):
        values["truncation"] = {
            "direction": "Right",
            "max_length": 512,
            "strategy": "LongestFirst",
            "stride": 0,
        }

    edit(directory, "tokenizer.json", change)


def slow_of_4(directory, spieces):
    """``spiece.model``, and the tokens in ``tokenizer_config.json``."""
    tokens = decoder("<sep>", "[x]") | decoder("<hl>", first=NEW + 2, special=True)
    specials = {str(i): token(n, special=True) for i, n in enumerate(("<pad>", "</s>", "<unk>"))}
    spiece_only(directory, spieces, added_tokens_decoder=specials | SENTINELS | tokens)
    write_json(directory / "added_tokens.json", {"<sep>": NEW, "[x]": NEW + 1, "<hl>": NEW + 2})
    names = [*(f"<extra_id_{i}>" for i in range(EXTRA_IDS)), "<hl>"]
    write_json(directory / "special_tokens_map.json", {"additional_special_tokens": names})


def slow_of_3(directory, spieces):
    """Before ``added_tokens_decoder``."""
    spiece_only(directory, spieces)
    write_json(directory / "added_tokens.json", {"<sep>": NEW, "<hl>": NEW + 1})
    names = [*(f"<extra_id_{i}>" for i in range(EXTRA_IDS)), "<hl>"]
    special = {"eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": names}
    write_json(directory / "special_tokens_map.json", special)


def slow_of_3_with_names_in_settings(directory, spieces):
    names = [*(f"<extra_id_{i}>" for i in range(EXTRA_IDS)), "<hl>"]
    spiece_only(directory, spieces, additional_special_tokens=names)
    write_json(directory / "added_tokens.json", {"<sep>": NEW, "<hl>": NEW + 1})


def special_tokens_map_alone(directory, spieces):
    """Names without ids, some with flags."""
    spiece_only(directory, spieces)
    names = [*(f"<extra_id_{i}>" for i in range(EXTRA_IDS)), "<hl>", "[x]"]
    sep = {"content": "<sep>", "lstrip": True, "rstrip": False, "normalized": False}
    special = {"additional_special_tokens": names, "sep_token": sep | {"single_word": False}}
    write_json(directory / "special_tokens_map.json", special)


def special_tokens_map_beside_json(directory, spieces):
    saved(directory, spieces, ["[x]"])
    names = [*(f"<extra_id_{i}>" for i in range(EXTRA_IDS)), "<hl>"]
    special = {"additional_special_tokens": names, "sep_token": "<sep>"}
    write_json(directory / "special_tokens_map.json", special)


def special_tokens_map_beside_json_without_settings(directory, spieces):
    special_tokens_map_beside_json(directory, spieces)
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": EXTRA_IDS}
    write_json(directory / "tokenizer_config.json", settings)


def class_named_in_config(directory, spieces):
    """As the first releases have it, without ``tokenizer_config.json``."""
    saved(directory, spieces, PLAIN, SPECIAL)
    (directory / "tokenizer_config.json").unlink()
    change = {"tokenizer_class": "T5Tokenizer"}
    edit(directory, "config.json", lambda values: values.update(change))


def added_tokens_json_alone(directory, spieces):
    spiece_only(directory, spieces)
    write_json(directory / "added_tokens.json", {"<sep>": NEW, "<hl>": NEW + 1})


def fast_of_4(directory, spieces):
    """All files: ``tokenizer.json`` of version 4 with sentinels beside the model."""
    saved(directory, spieces, ["<sep>"], ["<hl>"], keeps_spiece=True)

    def change(values):
        del values["model"]["vocab"][-EXTRA_IDS:]
        space = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
        values["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, space],
        }
        values["decoder"] = space

    edit(directory, "tokenizer.json", change)
    tokens = decoder("<sep>") | decoder("<hl>", first=NEW + 1, special=True, normalized=False)
    change = {"added_tokens_decoder": SENTINELS | tokens, "tokenizer_class": "T5Tokenizer"}
    edit(directory, "tokenizer_config.json", lambda values: values.update(change))


def settings_that_leave_a_token_out(directory, spieces):
    """``added_tokens_decoder`` comes before what ``tokenizer.json`` adds."""
    saved(directory, spieces, ["<sep>", "<hl>"])
    change = {"added_tokens_decoder": decoder("<sep>")}
    edit(directory, "tokenizer_config.json", lambda values: values.update(change))


def a_token_with_a_role(directory, spieces):
    spiece_only(directory, spieces, sep_token="<sep>", cls_token="<hl>", bos_token="<s>")


def roles_in_5(directory, spieces):
    saved(directory, spieces, ["[x]"], ["<hl>"], sep_token="<sep>")


def extra_special_by_name(directory, spieces):
    spiece_only(directory, spieces, extra_special_tokens={"highlight_token": "<hl>"})


def extra_special_list(directory, spieces):
    saved(directory, spieces)
    change = {"extra_special_tokens": ["<hl>", "<sep>"]}
    edit(directory, "tokenizer_config.json", lambda values: values.update(change))


def symbols_of_the_spiece(directory, spieces):
    spiece_only(directory, spieces, "symbols")


def symbols_in_5(directory, spieces):
    saved(directory, spieces, ["[x]"], name="symbols")


def other_end(directory, spieces):
    """A token that ends a source with an id of its own."""
    spiece_only(directory, spieces, eos_token="<end>")


def own_ids_of_the_spiece(directory, spieces):
    spiece_only(directory, spieces, "own", extra_ids=0)
    config(directory, ids=OWN_IDS)


def own_ids_and_sentinels(directory, spieces):
    spiece_only(directory, spieces, "own")
    config(directory, ids=OWN_IDS)


def own_ids_and_tokens(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL, name="own", extra_ids=0)
    config(directory, ids=OWN_IDS)


def own_ids_as_it_is(directory, spieces):
    saved(directory, spieces, PLAIN, SPECIAL, name="own", extra_ids=0)
    change = {"tokenizer_class": "PreTrainedTokenizerFast"}
    edit(directory, "tokenizer_config.json", lambda values: values.update(change))
    config(directory, ids=OWN_IDS)


UNIGRAM, SPIECE, MAPPED = UnigramVocabulary, SentencePieceVocabulary, MappedVocabulary
LAYOUTS = [
    (plain_json, UNIGRAM),
    (plain_both, SPIECE),
    (plain_spiece, SPIECE),
    (plain_spiece_of_mt5, SPIECE),
    (plain_without_settings, UNIGRAM),
    (steps_that_t5_leaves_out, UNIGRAM),
    (steps_as_they_are, UNIGRAM),
    (steps_and_tokens, UNIGRAM),
    (another_spiece_beside_it, UNIGRAM),
    (added_in_5, UNIGRAM),
    (added_in_5_beside_spiece, UNIGRAM),
    (special_alone_in_5, UNIGRAM),
    (white_space_in_5, UNIGRAM),
    (flagged_in_5, UNIGRAM),
    (a_piece_in_5, UNIGRAM),
    (added_in_5_to_mt5, UNIGRAM),
    (added_in_5_without_settings, UNIGRAM),
    (added_in_5_as_it_is, UNIGRAM),
    (added_to_umt5, UNIGRAM),
    (cut_and_padded_in_5, UNIGRAM),
    (slow_of_4, UNIGRAM),
    (slow_of_3, UNIGRAM),
    (slow_of_3_with_names_in_settings, UNIGRAM),
    (special_tokens_map_alone, UNIGRAM),
    (special_tokens_map_beside_json, UNIGRAM),
    (special_tokens_map_beside_json_without_settings, UNIGRAM),
    (class_named_in_config, UNIGRAM),
    (added_tokens_json_alone, UNIGRAM),
    (fast_of_4, UNIGRAM),
    (settings_that_leave_a_token_out, UNIGRAM),
    (a_token_with_a_role, UNIGRAM),
    (roles_in_5, UNIGRAM),
    (extra_special_by_name, UNIGRAM),
    (extra_special_list, UNIGRAM),
    (symbols_of_the_spiece, UNIGRAM),
    (symbols_in_5, UNIGRAM),
    (other_end, UNIGRAM),
    (own_ids_of_the_spiece, MAPPED),
    (own_ids_and_sentinels, MAPPED),
    (own_ids_and_tokens, MAPPED),
    (own_ids_as_it_is, MAPPED),
]
BOTH = pytest.mark.parametrize(
    ("layout", "kind"), LAYOUTS, ids=lambda part: getattr(part, "__name__", None)
)


@pytest.fixture
def pair(layout, tmp_path, spieces):
    """Our vocabulary of a layout and transformers' tokenizer."""
    layout(tmp_path, spieces)
    values = json.loads((tmp_path / "config.json").read_text())
    ours = read_vocabulary(tmp_path, values)
    return ours, transformers.AutoTokenizer.from_pretrained(tmp_path)


@BOTH
def test_ids_of_texts(pair, kind):
    ours, theirs = pair
    assert type(ours) is kind
    for text in texts():
        found = (
            ours.to_theirs(ours.framed(ours.encode(text)))
            if kind is not SPIECE
            else [*ours.encode(text), 1]
        )
        assert found == theirs(text).input_ids, (text, theirs.tokenize(text))


@BOTH
def test_texts_of_ids(pair, kind):
    ours, theirs = pair
    chooser = random.Random(1)
    last = NEW if kind is SPIECE or not getattr(ours, "has_added", True) else len(theirs)
    for _ in range(150):
        ids = chooser.choices(range(3, min(last, len(theirs))), k=chooser.randrange(1, 9))
        if not getattr(ours, "has_added", kind is MAPPED):
            # As SentencePiece has it: sentinels are words, and no text begins with white space.
            ids = [i for i in ids if i < PIECES]
            expected = theirs.decode(ids, skip_special_tokens=True).lstrip(" ")
            assert ours.decode(ids) == expected
            continue
        own = ours.from_theirs(ids)
        assert ours.decode(own) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_that_normalisation_makes_one(tmp_path, spieces):
    saved(tmp_path, spieces, ["\n", "\t"])
    message = message_of(
        read_vocabulary, tmp_path, json.loads((tmp_path / "config.json").read_text())
    )
    assert "'\\n' and '\\t', which are one" in message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"added_tokens_decoder": decoder("<sep>", first=NEW + 3)}, f"'<sep>' id {NEW + 3}, and"),
        ({"added_tokens_decoder": {"5": 7}}, "describes no added tokens"),
        ({"added_tokens_decoder": {"five": token("<x>")}}, "describes no added tokens"),
    ],
)
def test_added_tokens_that_are_refused(tmp_path, spieces, settings, expected):
    spiece_only(tmp_path, spieces, **settings)
    values = json.loads((tmp_path / "config.json").read_text())
    assert expected in message_of(read_vocabulary, tmp_path, values)


def test_a_tokenizer_that_ends_no_source(tmp_path, spieces):
    added_in_5_as_it_is(tmp_path, spieces)
    edit(tmp_path, "tokenizer.json", lambda values: values.update(post_processor=None))
    values = json.loads((tmp_path / "config.json").read_text())
    assert "ends a source with ids [], T5's with [1]" in message_of(
        read_vocabulary, tmp_path, values
    )


def test_tokens_added_to_a_umt5_without_tokenizer_json(tmp_path, spieces):
    slow_of_3(tmp_path, spieces)
    config(tmp_path, "umt5")
    values = json.loads((tmp_path / "config.json").read_text())
    assert "transformers cannot read the tokenizer" in message_of(read_vocabulary, tmp_path, values)


def byt5(directory, **settings):
    tokenizer = transformers.ByT5Tokenizer(**settings)
    tokenizer.save_pretrained(directory)
    config(directory, rows=384)
    return tokenizer


@pytest.mark.parametrize("layout", ["saved by 5", "of 4", "in config", "without settings"])
def test_ids_and_texts_of_byt5(tmp_path, layout):
    byt5(tmp_path)
    if layout == "of 4":
        (tmp_path / "added_tokens.json").unlink()
        settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
        names = [f"<extra_id_{i}>" for i in range(125)]
        write_json(tmp_path / "tokenizer_config.json", settings)
        write_json(tmp_path / "special_tokens_map.json", {"additional_special_tokens": names})
    if layout in ("in config", "without settings"):
        (tmp_path / "added_tokens.json").unlink()
        (tmp_path / "tokenizer_config.json").unlink()
    if layout == "in config":
        change = {"tokenizer_class": "ByT5Tokenizer"}
        edit(tmp_path, "config.json", lambda values: values.update(change))
    ours = read_vocabulary(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert isinstance(ours, ByteVocabulary)
    assert ours.vocab_size == 384 and ours.fingerprint() == ByteVocabulary().fingerprint()
    if layout == "without settings":
        theirs = transformers.ByT5Tokenizer()
    else:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts(40), "<extra_id_0>", "a <extra_id_124> <extra_id_125>b<extra_id_07>"]:
        ids = theirs(text).input_ids
        assert ours.framed(ours.encode(text)) == ids
        assert ours.decode(ids[:-1]) == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_added_to_byt5(tmp_path):
    tokenizer = byt5(tmp_path)
    tokenizer.add_tokens(["<hl>"])
    tokenizer.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert "adds token '<hl>' with id 384 to ByT5's" in message_of(
        read_vocabulary, tmp_path, values
    )


@pytest.mark.parametrize("layout", [plain_spiece, plain_json, added_in_5, own_ids_of_the_spiece])
def test_spaces_that_a_tokenizer_takes_out_of_texts(tmp_path, spieces, layout):
    layout(tmp_path, spieces)
    change = {"clean_up_tokenization_spaces": True}
    edit(tmp_path, "tokenizer_config.json", lambda values: values.update(change))
    ours = read_vocabulary(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("The cat . sleep .", add_special_tokens=False).input_ids
    own = ours.from_theirs(ids) if isinstance(ours, MappedVocabulary) else ids
    found = ours.decode(own)
    assert found == theirs.decode(ids, skip_special_tokens=True)
    assert "sleep." in found or layout is added_in_5
    ours.cleans_up = False
    assert "sleep ." in ours.decode(own) or layout is added_in_5
