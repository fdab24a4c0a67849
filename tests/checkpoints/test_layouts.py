"""Weights and config.json of Hugging Face directories: logits and texts equal transformers'.

Each layout is written and loaded by transformers, whose model is the expectation.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.huggingface import weight_files
from spec_t5x.checkpoints.huggingface.t5 import (
    EOS,
    EOS_IDS,
    PAD,
    START,
    read_config,
    special_ids,
)
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.storage.tensors import array_tensors
from spec_t5x.generation import GenerateOptions, Generator
from tests.checkpoints.faults import message_of
from tests.torch_t5 import SIZES, assert_same_logits, enlivened

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

ROWS = 160
IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
SHARED, HEAD = "shared.weight", "lm_head.weight"
SOURCES, TARGETS = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
TEXTS = ["the quick fox", "seven lazy dogs", "box the wizards", "brown"]
OPTIONS = GenerateOptions(gamma=3, max_decode_len=12, batch_size=2)


@pytest.fixture
def directory(tmp_path, spiece):
    """Provides a directory with a vocabulary and nothing else."""
    (tmp_path / "spiece.model").write_bytes(spiece.read_bytes())
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


NULL = object()


def write(directory, kind="t5", seed=0, layers=1, rows=ROWS, **changes):
    """Saves a model of transformers with this config.json: None removes an entry, NULL nulls it."""
    torch.manual_seed(seed)
    sizes = {**SIZES, "vocab_size": rows, "num_layers": layers, "num_decoder_layers": layers}
    config = transformers.AutoConfig.for_model(kind, **sizes, **IDS)
    enlivened(transformers.AutoModelForSeq2SeqLM.from_config(config)).save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    left_out = ("tie_word_embeddings", "scale_decoder_outputs", "dense_act_fn", "is_gated_act")
    path = directory / "config.json"
    values = {n: v for n, v in json.loads(path.read_text()).items() if n not in left_out} | changes
    values = {n: v for n, v in values.items() if v is not None}
    path.write_text(json.dumps({n: None if v is NULL else v for n, v in values.items()}))


def theirs(directory):
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()


def tables(directory, **numbers):
    """Stores these tables (of one number the same) in place of all others."""
    path = directory / "model.safetensors"
    stored = {n: t for n, t in load_file(path).items() if n not in (SHARED, SOURCES, TARGETS, HEAD)}
    names = {"shared": SHARED, "sources": SOURCES, "targets": TARGETS, "head": HEAD}
    for name, number in numbers.items():
        rng = np.random.default_rng(number)
        stored[names[name]] = rng.normal(0, 0.5, (ROWS, 32)).astype(np.float32)
    save_file(stored, path)


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
RESCALED, AS_IT_IS = {"scale_decoder_outputs": True}, {"scale_decoder_outputs": False}
EMBEDDINGS = [
    ("t5", {}, {"shared": 1}),
    ("t5", {}, {"shared": 1, "head": 2}),
    ("t5", TIED, {"shared": 1, "head": 2}),
    ("t5", TIED | AS_IT_IS, {"shared": 1, "head": 2}),
    ("t5", TIED | AS_IT_IS, {"shared": 1}),
    ("t5", UNTIED, {"shared": 1, "head": 2}),
    ("t5", UNTIED | RESCALED, {"shared": 1, "head": 2}),
    ("t5", UNTIED | RESCALED, {"shared": 1}),
    ("t5", {}, {"shared": 1, "sources": 1, "targets": 1, "head": 1}),
    ("t5", {}, {"sources": 1}),
    ("t5", {}, {"targets": 1}),
    ("t5", {}, {"head": 1}),
    ("t5", {}, {"sources": 1, "targets": 1, "head": 2}),
    ("t5", {}, {"targets": 1, "head": 1}),
    ("t5", {}, {"shared": 3, "sources": 1, "targets": 1}),
    ("t5", {}, {"shared": 3, "sources": 1, "targets": 1, "head": 2}),
    ("t5", UNTIED, {"shared": 3, "sources": 1, "targets": 1, "head": 1}),
    ("mt5", {}, {"shared": 1}),
    ("mt5", TIED, {"shared": 1, "head": 2}),
    ("mt5", UNTIED, {"shared": 1, "head": 2}),
    ("mt5", {"transformers_version": "4.30.0"}, {"shared": 1, "head": 2}),
    ("mt5", TIED | {"transformers_version": "4.30.0"}, {"shared": 1}),
    ("umt5", {}, {"shared": 1}),
    ("umt5", TIED, {"shared": 1, "head": 2}),
    ("umt5", UNTIED, {"shared": 1, "head": 2}),
    ("umt5", UNTIED, {"shared": 3, "sources": 1, "targets": 1, "head": 2}),
]


@pytest.mark.parametrize(("kind", "changes", "stored"), EMBEDDINGS)
def test_tables_are_used_where_transformers_uses_them(directory, kind, changes, stored):
    write(directory, kind, **changes)
    tables(directory, **stored)
    assert_same_logits(load(directory), theirs(directory))


@pytest.mark.parametrize(
    "stored",
    [
        {"shared": 1, "sources": 2},
        {"shared": 1, "targets": 2},
        {"sources": 1, "targets": 2},
        {"shared": 1, "sources": 2, "targets": 3, "head": 4},
    ],
)
def test_two_embeddings_are_refused(directory, stored):
    write(directory)
    tables(directory, **stored)
    message = message_of(load, directory)
    assert "encoder and decoder share one embedding here" in message and str(directory) in message


def test_tables_are_compared_up_to_their_last_row(monkeypatch):
    monkeypatch.setattr(weight_files, "_ROWS", 4)
    table, other = np.zeros((10, 3), np.float32), np.zeros((10, 3), np.float32)
    tensors = array_tensors({"one": table, "other": other})
    assert weight_files.same_table(tensors["one"], tensors["other"])
    other[-1, -1] = 1.0
    assert not weight_files.same_table(tensors["one"], tensors["other"])
    # A damaged file may have vectors, which the check of shapes refuses.
    vectors = array_tensors({"one": table[0], "other": other[0]})
    assert not weight_files.same_table(vectors["one"], vectors["other"])


def test_a_head_in_half_precision_is_rescaled_in_float32():
    table = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float16)
    scaled = weight_files.scaled(array_tensors({"head": table})["head"], 32**-0.5)
    found = scaled.read((slice(0, 10), slice(0, 3)))
    np.testing.assert_array_equal(found, table.astype(np.float32) * np.float32(32**-0.5))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_prefixes_of_wrappers(directory, prefix):
    write(directory)
    tables(directory, shared=1, sources=1, targets=1, head=2)
    model, path = theirs(directory), directory / "model.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in load_file(path).items()}, path)
    assert_same_logits(load(directory), model)


def test_a_head_of_its_own_stays_after_a_conversion(directory, tmp_path):
    """T5 1.0 with an output layer that was trained alone."""
    write(directory)
    tables(directory, shared=1, head=2)
    convert(directory, tmp_path / "there", to="huggingface", dtype="float32")
    assert_same_logits(load(directory), theirs(tmp_path / "there"))


ACTIVATIONS = [
    ("t5", {"feed_forward_proj": None}),
    ("mt5", {"feed_forward_proj": None}),
    ("umt5", {"feed_forward_proj": None}),
    ("mt5", {"feed_forward_proj": None, "dense_act_fn": "gelu_new", "is_gated_act": True}),
    ("umt5", {"feed_forward_proj": None, "dense_act_fn": "silu"}),
    ("t5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"}),
    ("mt5", {"feed_forward_proj": "relu", "is_gated_act": True}),
    ("mt5", {"feed_forward_proj": "gated-gelu", "is_gated_act": NULL}),
    ("t5", {"feed_forward_proj": "gated-gelu_new"}),
    ("t5", {"feed_forward_proj": "gated-gelu_fast"}),
    ("t5", {"feed_forward_proj": "gelu_pytorch_tanh"}),
    ("mt5", {"feed_forward_proj": "gated-gelu_accurate"}),
    ("umt5", {"feed_forward_proj": "gated-gelu_python_tanh"}),
    ("t5", {"feed_forward_proj": "swish"}),
    ("mt5", {"feed_forward_proj": "gated-swish"}),
    ("t5", {"feed_forward_proj": "gated-tanh"}),
    ("t5", {"feed_forward_proj": "gated-sigmoid"}),
    ("t5", {"feed_forward_proj": "gated-linear"}),
    ("t5", {"feed_forward_proj": "gelu_new"}),
]


@pytest.mark.parametrize(("kind", "changes"), ACTIVATIONS)
def test_activations_are_those_of_transformers(directory, kind, changes):
    write(directory, kind, **changes)
    # The configuration decides whether there are one or two matrices.
    config = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    model = enlivened(transformers.AutoModelForSeq2SeqLM.from_config(config))
    state = {name: tensor.contiguous().numpy() for name, tensor in model.state_dict().items()}
    save_file(state, directory / "model.safetensors")
    assert_same_logits(load(directory), theirs(directory), tolerance=1e-3)


# Entries of config.json, and generation_config.json.
SPECIAL_IDS = [
    ({}, None),
    (IDS, None),
    (IDS | {"eos_token_id": [4, 1]}, None),
    (IDS | {"pad_token_id": None}, None),
    (IDS | {"decoder_start_token_id": None, "bos_token_id": 7}, None),
    (IDS | {"bos_token_id": 7}, None),
    (IDS | {"decoder_start_token_id": 5, "eos_token_id": 6, "pad_token_id": None}, None),
    (IDS | {"decoder_start_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None}, None),
    (IDS | {"task_specific_params": {"summarization": {"eos_token_id": 7}}}, None),
    (IDS, IDS | {"eos_token_id": [1, 3]}),
    (IDS | {"eos_token_id": 7}, IDS),
    (IDS, {"decoder_start_token_id": 3, "eos_token_id": 4}),
    (IDS, {"decoder_start_token_id": 3, "eos_token_id": 4, "pad_token_id": 9}),
    (IDS, {"bos_token_id": 9, "eos_token_id": 4}),
    (IDS, {"decoder_start_token_id": None, "bos_token_id": 0, "eos_token_id": 1}),
    (IDS | {"bos_token_id": 9}, {"decoder_start_token_id": 0, "eos_token_id": [1]}),
    ({"eos_token_id": 5}, {"decoder_start_token_id": 0, "eos_token_id": 1, "num_beams": 4}),
    # Without a start, which is then config.json's.
    (IDS, {"eos_token_id": [1, 3]}),
    (IDS, {"eos_token_id": 4, "pad_token_id": 9}),
    (IDS | {"eos_token_id": 7, "pad_token_id": None}, {"eos_token_id": [4, 5], "num_beams": 4}),
]


@pytest.mark.parametrize(("configured", "generation"), SPECIAL_IDS)
@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
def test_special_ids_are_those_of_transformers(directory, kind, configured, generation):
    write(directory, kind, **(dict.fromkeys(IDS) | configured))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    model = theirs(directory)
    given = {}
    if generation and not generation.keys() & {"decoder_start_token_id", "bos_token_id"}:
        given = {"decoder_start_token_id": configured["decoder_start_token_id"]}
    settings, _ = model._prepare_generation_config(None, **given)
    values = json.loads((directory / "config.json").read_text())
    found = special_ids(values, directory)
    if not configured and generation is None:
        # Which transformers generates nothing from.
        assert found == {START: 0, EOS: 1, EOS_IDS: [1], PAD: 0}
        return
    model._prepare_special_tokens(settings, device="cpu")
    assert found[START] == settings._decoder_start_token_tensor.item()
    ends = settings._eos_token_tensor.tolist()
    assert found[EOS] == found[EOS_IDS][0] and {*found[EOS_IDS]} == {*ends}
    # It pads outputs there, and here what comes after the end is cut off.
    are_t5s = found[START] == 0 and 1 in ends
    assert found[PAD] == settings._pad_token_tensor.item() or are_t5s
    assert found[EOS] == (1 if are_t5s else ends[0])


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
def test_absent_entries_have_the_defaults_of_transformers(directory, kind):
    needed = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers")
    sizes = dict.fromkeys(needed, 4)
    whole = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    sparse = {"model_type": kind, **sizes}
    assert read_config(sparse, directory) == read_config(whole, directory)


@pytest.mark.parametrize(
    ("configured", "generation", "expected"),
    [
        (
            {"decoder_start_token_id": 0},
            None,
            "config.json has no eos_token_id, so that no text ends",
        ),
        (IDS, {"decoder_start_token_id": 0}, "generation_config.json has no eos_token_id"),
        (IDS, {"bos_token_id": 0, "eos_token_id": None}, "generation_config.json has no eos_tok"),
        (IDS, {"bos_token_id": 0, "eos_token_id": [1, ROWS]}, f"has eos_token_id [1, {ROWS}]"),
        (IDS | {"decoder_start_token_id": [0, 0]}, None, "has decoder_start_token_id [0, 0]"),
    ],
)
def test_special_ids_that_are_refused(directory, configured, generation, expected):
    write(directory, **(dict.fromkeys(IDS) | configured))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert expected in message_of(load, directory)


def generated(directory):
    """Returns ids and texts that transformers writes, without what starts and pads them."""
    model, tokenizer = theirs(directory), transformers.AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    rows = model.generate(**inputs, max_new_tokens=OPTIONS.max_decode_len).numpy()[:, 1:]
    return rows, [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def add_tokens(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["<sep>"])
    special = {"additional_special_tokens": ["<hl>"]}
    tokenizer.add_special_tokens(special, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(directory)


@pytest.mark.parametrize("layout", ["added tokens", "two ends", "other ids", "head"])
def test_greedy_texts_are_those_of_transformers(directory, layout, monkeypatch):
    changes = {}
    if layout == "two ends":
        changes = {"eos_token_id": [17, 1, 60, 5]}
    if layout == "other ids":
        changes = {"decoder_start_token_id": 7, "eos_token_id": [5, 17, 60], "pad_token_id": 0}
    write(directory, layers=2, **changes)
    if layout == "added tokens":
        add_tokens(directory)
        monkeypatch.setattr(
            f"{__name__}.TEXTS",
            ["the <hl> quick <hl>", "a<sep>fox", "<sep>", "dogs <extra_id_0> b"],
        )
    if layout == "head":
        tables(directory, shared=1, head=2)
    rows, expected = generated(directory)
    for draft in (None, "early_exit:1"):
        generator = Generator.load(directory, draft)
        to_theirs = getattr(generator.vocabulary, "to_theirs", list)
        answers = [answer for answer, *_ in generator.generate(TEXTS, OPTIONS)]
        for answer, row, text in zip(answers, rows, expected, strict=True):
            ids = to_theirs(answer.output_ids)
            assert ids == row.tolist()[: len(ids)]
            assert len(ids) == OPTIONS.max_decode_len or not any(row[len(ids) :])
            # As SentencePiece has it, sentinels are in the texts of T5's own vocabulary.
            assert answer.output == text or layout in ("head", "two ends")


@pytest.mark.parametrize("layout", ["added tokens", "two ends", "other ids", "bytes"])
def test_conversions_keep_the_tokenizer(directory, tmp_path, layout):
    ids = {"decoder_start_token_id": 7, "eos_token_id": [5, 17], "pad_token_id": 0}
    ends = {"eos_token_id": [17, 1]}
    changes = {"other ids": ids, "two ends": ends}
    write(directory, rows=384, **changes.get(layout, {}))
    if layout == "added tokens":
        add_tokens(directory)
    if layout == "bytes":
        (directory / "spiece.model").unlink()
        transformers.ByT5Tokenizer().save_pretrained(directory)
    change = {"clean_up_tokenization_spaces": True}
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    convert(directory, tmp_path / "native", to="native", dtype="float32")
    convert(tmp_path / "native", tmp_path / "there", to="huggingface")
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(place)
        for place in (directory, tmp_path / "there")
    ]
    ours = load(tmp_path / "native").vocabulary
    assert ours.eos_ids == load(directory).vocabulary.eos_ids
    assert ours.eos_ids == load(tmp_path / "there").vocabulary.eos_ids
    assert len(ours.eos_ids) == (2 if layout in changes else 1)
    to_theirs = getattr(ours, "to_theirs", list)
    for text in ("the <hl> quick .<sep> fox", "a <extra_id_1> b", "seven dogs box"):
        before, after = (tokenizer(text).input_ids for tokenizer in tokenizers)
        assert before == after == to_theirs(ours.framed(ours.encode(text)))
        texts = [tokenizer.decode(before, skip_special_tokens=True) for tokenizer in tokenizers]
        assert texts[0] == texts[1]
        # As SentencePiece has it, T5's own vocabulary shows what is unknown.
        assert texts[0] == ours.decode(ours.encode(text)) or layout == "two ends"


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 308000000\n"


LFS_FILES = """model.safetensors model.safetensors.index.json pytorch_model.bin spiece.model
tokenizer.json config.json tokenizer_config.json generation_config.json"""


@pytest.mark.parametrize("name", LFS_FILES.split())
def test_pointers_of_git_lfs(directory, name):
    write(directory)
    if name == "pytorch_model.bin" or name.endswith("index.json"):
        (directory / "model.safetensors").unlink()
    (directory / name).write_text(POINTER)
    message = message_of(load, directory)
    assert f"{directory / name} is a pointer of Git LFS" in message and "git lfs pull" in message


def test_names_of_two_kinds_are_named(directory):
    """A prefix that not all tensors have is no wrapper's."""
    write(directory)
    path = directory / "model.safetensors"
    stored = load_file(path)
    norm = "encoder.final_layer_norm.weight"
    stored[f"module.{norm}"] = stored.pop(norm)
    save_file(stored, path)
    message = message_of(load, directory)
    assert f"1 missing (encoder.final_layer_norm.weight), 1 unexpected (module.{norm})" in message


def test_the_model_before_tokens_were_added_drafts_for_the_one_after(directory, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(directory, small, ignore=shutil.ignore_patterns("small"))
    write(small, rows=140)
    write(directory, layers=2)
    add_tokens(directory)
    texts = ["the <hl> quick <hl>", "a<sep>fox", "dogs"]
    plain = [a.output_ids for a, *_ in Generator.load(directory).generate(texts, OPTIONS)]
    answers = Generator.load(directory, small).generate(texts, OPTIONS)
    assert [answer.output_ids for answer, *_ in answers] == plain
    assert "have different vocabularies" in message_of(Generator.load, small, directory)
