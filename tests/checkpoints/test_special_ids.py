"""T5s with other ids that start, pad and end a text: the tokens of transformers, renumbered."""

import functools
import json
import shutil

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.loading import load, load_vocabulary
from spec_t5x.cli.main import main
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.training.exports import save_ngram
from spec_t5x.labs.training.ngram_counts import count_ngrams, join_texts
from tests.checkpoints.faults import edit_config, message_of
from tests.torch_t5 import SIZES, enlivened, forward, logits_of

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

# What starts, ends and pads a text.
FAMILIES = {
    "madlad": ("t5", 0, 2, 1),
    "codet5p": ("t5", 0, 2, 0),
    "nort5": ("t5", 5, 6, 3),
    "pile-t5": ("umt5", 0, 2, 0),
}
NUM_IDS, NUM_NEW = 61, 14
WORDS = [
    *["the", "quick", "brown", "fox", "jumps", "over"],
    *["lazy", "dogs", "while", "seven", "wizards", "box"],
]
TEXTS = ["the quick fox", "seven lazy dogs", "zebra wizards jumps", "box <extra_id_0> the brown"]
# A character that no piece has.
WITH_UNKNOWN = 2
OPTIONS = GenerateOptions(gamma=3, max_decode_len=NUM_NEW, batch_size=2)


def tokenizer_of(start: int, eos: int, pad: int) -> tokenizers.Tokenizer:
    """Pieces of words around the special ids; what is unknown has id 0, as in MADLAD-400."""
    names = [f"filler{i}" for i in range(NUM_IDS - 1)] + ["<extra_id_0>"]
    for token, name in ((start, "<s>"), (pad, "<pad>"), (eos, "</s>"), (0, "<unk>")):
        names[token] = name
    letters = sorted(set("".join(WORDS)) - set("z"))
    free = [i for i, name in enumerate(names) if name.startswith("filler")]
    for i, name in zip(free, [*(f"▁{word}" for word in WORDS), "▁", *letters], strict=False):
        names[i] = name
    pieces = [(name, -float(len(WORDS) if len(name) < 3 else 1)) for name in names]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    special = [tokenizers.AddedToken(names[i], special=True) for i in {start, eos, pad}]
    tokenizer.add_special_tokens([*special, "<extra_id_0>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", eos)]
    )
    return tokenizer


def save_tokenizer(directory, tokenizer: tokenizers.Tokenizer) -> None:
    """Writes a tokenizer that transformers takes as it is."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def torch_model(family: str, layers: int, seed: int, rows: int = NUM_IDS):
    kind, start, eos, pad = FAMILIES[family]
    torch.manual_seed(seed)
    ids = {"decoder_start_token_id": start, "eos_token_id": eos, "pad_token_id": pad}
    sizes = {**SIZES, "vocab_size": rows, "num_layers": layers, "num_decoder_layers": layers}
    # As Pile-T5, whose last states are not scaled.
    tied = {"tie_word_embeddings": kind != "umt5"}
    config = transformers.AutoConfig.for_model(kind, **sizes, **ids, **tied)
    return enlivened(transformers.AutoModelForSeq2SeqLM.from_config(config))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Provides ``made(family)``: a target, and the directory of it and of a smaller model."""

    @functools.cache
    def make(family):
        root = tmp_path_factory.mktemp(family)
        models = [torch_model(family, 2, 1), torch_model(family, 1, 2)]
        for name, model in zip(("target", "draft"), models, strict=True):
            model.save_pretrained(root / name)
            save_tokenizer(root / name, tokenizer_of(*FAMILIES[family][1:]))
        return models[0], root

    return make


def their_sources(tokenizer, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids as transformers' tokenizer gives them, and the mask of those that are tokens."""
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    width = max(map(len, ids))
    padded = np.array([[*row, *[pad] * (width - len(row))] for row in ids])
    return padded, np.arange(width) < np.array([[len(row)] for row in ids])


def same_logits(model, loaded, theirs, is_token, texts, start: int, **more) -> np.ndarray:
    """Returns our logits of texts in their ids, which must be those of a torch model."""
    inputs = np.concatenate([np.full((len(texts), 1), start), texts[:, :-1]], 1)
    expected = logits_of(model, theirs, is_token, inputs, **more)
    ours = np.array(loaded.vocabulary.from_theirs(range(NUM_IDS)))
    sources, targets = np.where(is_token, ours[theirs], 0), ours[texts]
    shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    logits = forward(loaded.config)({"params": loaded.params}, sources, shifted, targets)
    np.testing.assert_allclose(logits[..., ours], expected, rtol=0, atol=2e-4)
    assert np.std(expected) > 0.1
    return np.asarray(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(made, family):
    model, root = made(family)
    loaded = load(root / "target")
    assert loaded.config.vocab_size == 128 and loaded.config.added_rows == 67
    _, *special = FAMILIES[family]
    theirs, is_token = their_sources(tokenizer_of(*special), special[2])
    # What is unknown is a token, of the id that pads or starts elsewhere.
    assert 0 in theirs[WITH_UNKNOWN][is_token[WITH_UNKNOWN]]
    texts = np.random.default_rng(0).integers(0, NUM_IDS, (len(TEXTS), 9))
    logits = same_logits(model, loaded, theirs, is_token, texts, special[0])
    others = np.delete(np.arange(128), loaded.vocabulary.from_theirs(range(NUM_IDS)))
    assert (logits[..., others] < -1e9).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_that_of_transformers(made, family):
    model, root = made(family)
    _, _, eos, pad = FAMILIES[family]
    tokenizer = tokenizer_of(*FAMILIES[family][1:])
    theirs, is_token = map(torch.tensor, their_sources(tokenizer, pad))
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": NUM_NEW}
    expected = model.generate(theirs, attention_mask=is_token.long(), **options).numpy()[:, 1:]
    assert len(np.unique(expected)) > 7
    for draft in (None, str(root / "draft"), "copy", "early_exit:1", "int8"):
        generator = Generator.load(root / "target", draft)
        answers = generator.generate(TEXTS, OPTIONS)
        for (answer, *_), row in zip(answers, expected, strict=True):
            ids = generator.vocabulary.to_theirs(answer.output_ids)
            assert ids == row.tolist()[: len(ids)]
            assert len(ids) == NUM_NEW or ids[-1] == eos
            text = tokenizer.decode(ids[:-1] if ids[-1] == eos else ids, skip_special_tokens=True)
            assert answer.output == text


# Of the draft's 128 or 256 rows, with the target's number of them, those that are no token's.
@pytest.mark.parametrize(("rows", "added"), [((NUM_IDS, 140), 1), ((140, NUM_IDS), 256 - NUM_IDS)])
def test_a_draft_that_is_padded_to_another_size(tmp_path, rows, added):
    for name, number, layers in zip(("target", "draft"), rows, (2, 1), strict=True):
        torch_model("pile-t5", layers, 1, number).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name, tokenizer_of(*FAMILIES["pile-t5"][1:]))
    plain = [a.output_ids for a, *_ in Generator.load(tmp_path / "target").generate(TEXTS, OPTIONS)]
    generator = Generator.load(tmp_path / "target", tmp_path / "draft")
    assert generator.draft.model.config.added_rows == added
    found = [answer for answer, *_ in generator.generate(TEXTS, OPTIONS)]
    assert [answer.output_ids for answer in found] == plain


def test_n_grams_and_bulk_inference_where_id_0_is_a_token(made, tmp_path):
    """The tables of what was counted, and ``spec-t5x infer``, of MADLAD-400's kind."""
    _, root = made("madlad")
    target = load(root / "target")
    plain = [a[0] for a in Generator.load(root / "target").generate(TEXTS, OPTIONS)]
    texts = [[*target.vocabulary.encode(text), 1] for text in [*TEXTS, *(a.output for a in plain)]]
    counted = count_ngrams(join_texts(texts), target.vocabulary.vocab_size, order=3)
    save_ngram(tmp_path / "ngrams", counted, target.vocabulary)
    draft = f"ngram:{tmp_path / 'ngrams'}"
    found = [a[0] for a in Generator.load(root / "target", draft).generate(TEXTS, OPTIONS)]
    assert [a.output_ids for a in found] == [a.output_ids for a in plain]
    assert sum(a.accepted for a in found) > 0
    sources, out = tmp_path / "sources.txt", tmp_path / "out"
    sources.write_text("".join(f"{text}\n" for text in TEXTS))
    given = {"input": sources, "output_dir": out, "target": root / "target", "draft": draft}
    options = {"gamma": 3, "max_decode_len": NUM_NEW, "batch_size": 2}
    flags = [f"--{name}={value}" for name, value in (given | options).items()]
    assert main(["infer", *flags]) == 0
    lines = [json.loads(line) for path in [out / "predictions.jsonl"] for line in path.open()]
    assert [line["output"] for line in lines] == [a.output for a in plain]


def test_the_names_of_special_tokens_are_text_and_sentinels_are_tokens(made):
    vocabulary = load_vocabulary(made("nort5")[1] / "target")
    sentinel, eos = vocabulary.from_theirs([NUM_IDS - 1, FAMILIES["nort5"][2]])
    assert eos == 1
    assert sentinel in vocabulary.encode("box <extra_id_0> the")
    assert eos not in vocabulary.encode("box </s> the")
    assert vocabulary.decode(vocabulary.encode("box the")) == "box the"


def test_an_ordinary_piece_that_ends_a_text_is_a_token_in_a_source(made, tmp_path):
    directory = shutil.copytree(made("nort5")[1] / "target", tmp_path / "target")
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    path = directory / "generation_config.json"
    values = json.loads(path.read_text()) | {"eos_token_id": tokenizer.token_to_id("▁box")}
    path.write_text(json.dumps(values))
    vocabulary = load_vocabulary(directory)
    ids = vocabulary.framed(vocabulary.encode("the box jumps"))
    assert 1 in ids and vocabulary.to_theirs(ids) == tokenizer.encode("the box jumps").ids


@pytest.mark.parametrize("family", ["madlad", "pile-t5"])
def test_conversions(made, tmp_path, family):
    _, root = made(family)
    convert(root / "target", tmp_path / "native", to="native", dtype="float32")
    convert(tmp_path / "native", tmp_path / "theirs", to="huggingface")
    before, after = (
        load_file(d / "model.safetensors") for d in (root / "target", tmp_path / "theirs")
    )
    assert before.keys() - after.keys() <= {"lm_head.weight"}
    # Pile-T5's output layer is separate here.
    assert ("lm_head.weight" in after) == (family == "pile-t5")
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, before.get(name, before["shared.weight"]))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    found = config.decoder_start_token_id, config.eos_token_id, config.pad_token_id
    assert found == FAMILIES[family][1:]
    texts = [
        [answer[0].output for answer in Generator.load(directory).generate(TEXTS, OPTIONS)]
        for directory in (root / "target", tmp_path / "native", tmp_path / "theirs")
    ]
    assert texts[0] == texts[1] == texts[2]
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "theirs" / "tokenizer.json"))
    assert tokenizer.token_to_id("</s>") == FAMILIES[family][2]
    message = message_of(convert, root / "target", tmp_path / "checkpoint_0", to="t5x")
    assert "has other special ids than T5's" in message


@pytest.fixture(scope="module")
def with_two(made):
    """Provides a target whose first text ends with the second of two ids, and the expectation."""
    model, root = made("madlad")
    _, *special = FAMILIES["madlad"]
    theirs, is_token = their_sources(tokenizer_of(*special), special[2])
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": NUM_NEW}
    given = {"attention_mask": torch.tensor(is_token).long(), **options}
    longest = model.generate(torch.tensor(theirs), **given).numpy()[:, 1:]
    # A token in the midst of the first text.
    second = next(token for token in longest[0, 4:].tolist() if token not in longest[0, :4])
    eos = [special[1], second]
    expected = model.generate(torch.tensor(theirs), eos_token_id=eos, **given).numpy()[:, 1:]
    assert (expected[0] != longest[0]).any()
    for name in ("target", "draft"):
        directory = root / f"two_{name}"
        shutil.copytree(root / name, directory)
        path = directory / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
    return root, expected, eos


@pytest.mark.parametrize("draft", [None, "two_draft", "copy", "native"])
def test_text_ends_at_the_first_of_several_ids(with_two, tmp_path, draft):
    root, expected, eos = with_two
    target = root / "two_target"
    if draft == "native":
        convert(target, tmp_path / "native", to="native", dtype="float32")
        convert(tmp_path / "native", tmp_path / "theirs", to="huggingface")
        target, draft = tmp_path / "theirs", "early_exit:1"
    draft = str(root / draft) if draft == "two_draft" else draft
    generator = Generator.load(target, draft)
    tokenizer = tokenizer_of(*FAMILIES["madlad"][1:])
    # In slots, and each by itself.
    for batch_size in (2, 1):
        found = list(generator.generate(TEXTS, OPTIONS, batch_size=batch_size))
        for (answer, *_), row in zip(found, expected, strict=True):
            ids = generator.vocabulary.to_theirs(answer.output_ids)
            assert ids == row.tolist()[: len(ids)]
            assert len(ids) == NUM_NEW or ids[-1] in eos
            whole = ids[:-1] if ids[-1] in eos else ids
            assert answer.output == tokenizer.decode(whole, skip_special_tokens=True)
    *_, last = generator.stream(TEXTS[0], OPTIONS)
    assert last.text == found[0][0].output


def test_ids_that_cannot_be(made, tmp_path):
    model, root = made("madlad")
    model.save_pretrained(tmp_path)
    assert "holds no vocabulary" in message_of(load, tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"no model")
    assert "is not a SentencePiece model" in message_of(load, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for token in (NUM_IDS, -1, "</s>", [], [1, NUM_IDS]):
        edit_config(tmp_path, eos_token_id=token)
        assert f"eos_token_id {token!r}" in message_of(load, tmp_path)
    edit_config(tmp_path, eos_token_id=True, decoder_start_token_id=5)
    assert "eos_token_id True" in message_of(load, tmp_path)
    target = shutil.copytree(root / "target", tmp_path / "target")
    edit_config(target, vocab_size=NUM_IDS + 1)
    expected = f"is [{NUM_IDS}, 32] and the configuration has vocab_size {NUM_IDS + 1}: give the"
    assert expected in message_of(load, target)


def test_a_tokenizer_that_ends_no_source(made, tmp_path, caplog):
    directory = shutil.copytree(made("madlad")[1] / "target", tmp_path / "target")
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    generator = Generator.load(directory, "int8")
    (line,) = caplog.messages
    assert line.startswith(f"the tokenizer in {directory} adds no special tokens to a source")
    assert generator.tokenize("the box", OPTIONS) == generator.vocabulary.encode("the box")
    assert generator.generate("the box", OPTIONS)[0].error is None
