"""Hugging Face's checkpoints, read and written; ``test_layouts`` compares more logits."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.huggingface import weight_files
from spec_t5x.checkpoints.loading import (
    check_same_vocabulary,
    load,
    load_vocabulary,
    named_vocabulary,
)
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.labs.training.exports import save_model
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID
from tests.checkpoints.faults import edit_config, message_of
from tests.torch_t5 import SIZES, assert_same_logits, enlivened

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation")


def add_vocabulary(directory, spiece, extra_ids=100):
    """Writes the files of transformers' tokenizer."""
    (directory / "spiece.model").write_bytes(spiece.read_bytes())
    values = {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def made(tmp_path_factory, spiece):
    """Provides a tiny T5 1.0 of transformers, and its directory."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "num_layers": 1, "num_decoder_layers": 2}
    config = transformers.T5Config(**SIZES, **sizes, decoder_start_token_id=0)
    model = enlivened(transformers.T5ForConditionalGeneration(config))
    directory = tmp_path_factory.mktemp("made")
    model.save_pretrained(directory)
    add_vocabulary(directory, spiece)
    return model, directory


@pytest.fixture
def directory(made, tmp_path):
    """Provides a copy of the directory, to spoil."""
    return Path(shutil.copytree(made[1], tmp_path / "theirs"))


def assert_refused(directory, expected):
    message = message_of(load, directory)
    assert expected in message and str(directory) in message


def test_shards_of_torch(made, directory):
    """Stores every alias of the embedding, and the leftover that old files carry."""
    (directory / "model.safetensors").unlink()
    state = made[0].state_dict()
    leftover = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    state[leftover] = torch.zeros(32, 3)
    weight_map = {name: f"pytorch_model-{len(name) % 2}.bin" for name in state}
    for file in set(weight_map.values()):
        part = {name: state[name] for name in state if weight_map[name] == file}
        torch.save(part, directory / file)
    index = json.dumps({"weight_map": weight_map})
    (directory / "pytorch_model.bin.index.json").write_text(index)
    assert_same_logits(load(directory), made[0])
    (directory / file).unlink()
    assert_refused(directory, f"no file {directory / file}")


@pytest.mark.parametrize(
    ("file", "dtype"),
    [("safetensors", "float16"), ("safetensors", "float64"), ("bin", "bfloat16")],
)
def test_half_and_double_precision_are_read_exactly(made, directory, dtype, file):
    model = transformers.T5ForConditionalGeneration.from_pretrained(made[1])
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    if file == "bin":
        (directory / "model.safetensors").unlink()
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
    assert_same_logits(load(directory), model.float())


@pytest.fixture
def with_tokenizer(directory):
    """Provides a T5 as transformers 5 saves it, without a spiece.model, and the same with one."""
    with_spiece = directory
    directory = with_spiece.with_name("of_transformers_5")
    shutil.copytree(with_spiece, directory, ignore=shutil.ignore_patterns("spiece.model"))
    transformers.AutoTokenizer.from_pretrained(with_spiece).save_pretrained(directory)
    assert not (directory / "spiece.model").exists()
    return directory, with_spiece


def test_tokenizer_json(with_tokenizer):
    directory, with_spiece = with_tokenizer
    ours, theirs = load(directory), load(with_spiece)
    assert isinstance(ours.vocabulary, UnigramVocabulary)
    # One may draft for the other.
    check_same_vocabulary(theirs, ours)
    check_same_vocabulary(ours, theirs)
    text = "the quick fox <extra_id_3>"
    assert ours.vocabulary.encode(text) == theirs.vocabulary.encode(text)


@pytest.mark.parametrize("to", ["native", "t5x", "huggingface"])
def test_tokenizer_json_is_kept(with_tokenizer, tmp_path, to):
    directory, _ = with_tokenizer
    destination = tmp_path / "checkpoint_1"
    convert(directory, destination, to=to)
    kept = (destination / "tokenizer.json").read_bytes()
    assert kept == (directory / "tokenizer.json").read_bytes()
    assert not (destination / "spiece.model").exists()
    vocabulary = load(destination).vocabulary
    assert vocabulary.fingerprint() == load_vocabulary(directory).fingerprint()
    if to == "huggingface":
        text = "the quick fox <extra_id_3>"
        tokenizer = transformers.AutoTokenizer.from_pretrained(destination)
        assert len(tokenizer) == vocabulary.vocab_size
        assert tokenizer(text)["input_ids"] == [*vocabulary.encode(text), EOS_ID]


def test_number_of_extra_ids(directory, spiece):
    assert load_vocabulary(directory).vocab_size == 40 + 100
    add_vocabulary(directory, spiece, extra_ids=7)
    assert load_vocabulary(directory).vocab_size == 40 + 7
    (directory / "tokenizer_config.json").unlink()
    assert load_vocabulary(directory).vocab_size == 40 + 100
    edit_config(directory, model_type="mt5")
    assert load_vocabulary(directory).vocab_size == named_vocabulary(directory).vocab_size == 40


def test_padding_of_another_id(made, directory, tmp_path):
    """transformers pads outputs after their end alone, so a draft with T5's padding fits."""
    before = load(directory)
    edit_config(directory, pad_token_id=1)
    settings = directory / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token_id": 1}))
    after = load(directory)
    assert after.config == before.config
    check_same_vocabulary(after, load(made[1]))
    convert(directory, tmp_path / "native", to="native")
    convert(tmp_path / "native", tmp_path / "back", to="huggingface")
    for read in (transformers.AutoConfig, transformers.GenerationConfig):
        assert read.from_pretrained(tmp_path / "back").pad_token_id == 1


# With mT5's number of rows, tied embeddings are still those of a T5.
@pytest.mark.parametrize(("version", "rows"), [("1.0", 160), ("1.1", 160), ("1.0", 250112)])
def test_export_is_read_by_transformers(
    tmp_path, vocabulary, configs, random_params, version, rows
):
    config = T5Config(**{**configs[version].to_dict(), "vocab_size": rows})
    save_model(tmp_path / "ours", random_params(config), config, vocabulary)
    loaded = load(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="huggingface", dtype="float32")
    model, report = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert not any(report.values())
    assert model.generation_config.decoder_start_token_id == 0
    assert load(tmp_path / "theirs").config == dataclasses.replace(loaded.config, dtype="float32")
    assert_same_logits(loaded, model.eval())


def test_export_of_a_large_model_is_in_several_files(tmp_path, saved, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 4000)
    done = []
    convert(
        saved,
        tmp_path / "theirs",
        to="huggingface",
        dtype="bfloat16",
        report=lambda *progress: done.append(progress),
    )
    files = sorted((tmp_path / "theirs").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    # A tensor that is larger than a file may be is alone in its own.
    assert all(len(load_file(file)) == 1 for file in files if file.stat().st_size > 6000)
    # Releases 4 of transformers read no file without it.
    assert safe_open(files[0], framework="numpy").metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    total = index["metadata"]["total_size"]
    assert done[-1] == (total, total) and done == sorted(done)
    model, report = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert not any(report.values())
    again, loaded = load(tmp_path / "theirs"), load(saved)
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "umt5"}, "1 missing (decoder.block.1.layer.0.SelfAttention.relative_att"),
        ({"model_type": "bart"}, "has model_type 'bart': give a T5"),
        ({"decoder_start_token_id": 160}, "has decoder_start_token_id 160"),
        ({"dense_act_fn": "gelu"}, "has the activation 'gelu' (feed_forward_proj 'relu')"),
        ({"dense_act_fn": "gelu_10"}, "has the activation 'gelu_10'"),
        (
            {"feed_forward_proj": None, "dense_act_fn": None},
            "has the activation None (feed_forward_proj 'None')",
        ),
        (
            {"feed_forward_proj": "glu-relu"},
            "has feed_forward_proj 'glu-relu': give ACTIVATION or gated-",
        ),
        ({"is_encoder_decoder": False}, "encoder-only model"),
        ({"quantization_config": {}}, "is quantized"),
        ({"vocab_size": "160"}, "config.json has vocab_size '160': set it to a number"),
        ({"transformers_weights": "other.safetensors"}, "has transformers_weights 'other.safe"),
        ({"d_model": None}, "has no d_model"),
        ({"hidden_size": 48}, "config.json has hidden_size 48 and d_model 32: leave out one"),
        ({"num_hidden_layers": 3}, "has num_hidden_layers 3 and num_layers 1: leave out one"),
        ({"num_attention_heads": 9}, "has num_attention_heads 9 and num_heads 3: leave out one"),
        ({"head_dim": 9}, "has head_dim 9 and d_kv 8: leave out one"),
        ({"sliding_window": 3}, "config.json has sliding_window 3: give a model without it"),
        ({"is_causal": True}, "config.json has is_causal True: give a model without it"),
        ({"is_causal": None}, "config.json has is_causal None: give a model without it"),
        ({"attention_chunk_size": 3}, "has attention_chunk_size 3: give a model without it"),
        ({"per_layer_config": {"0": {"d_ff": 9}}}, "has per_layer_config {'0': {'d_ff': 9}}: give"),
        ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon is nan: give a number from 0"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance is 16 and rel"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets 3: give 4 buckets"),
        (
            {"tie_word_embeddings": False, "scale_decoder_outputs": False},
            "1 missing (lm_head.weight)",
        ),
        ({"vocab_size": 120}, "has 140 ids, the model embeds 120"),
        ({"d_kv": 16}, "attention/key/kernel is [32, 24], not [32, 48]"),
        ({"num_layers": 2}, "8 missing (encoder.block.1.layer."),
        ({"num_decoder_layers": 1}, "13 unexpected (decoder.block.1"),
        ({"d_ff": 48.0}, "config.json: d_ff is 48.0: give a whole number of at least 1"),
        ({"layer_norm_epsilon": "1e-6"}, "config.json: layer_norm_epsilon is '1e-6': give a numb"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_unsuitable_configurations(directory, changes, expected):
    # Whose ids would come first.
    (directory / "generation_config.json").unlink()
    edit_config(directory, **changes)
    assert_refused(directory, expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "1 missing (encoder.final_layer_norm.weight)"),
        (np.full(32, np.nan, np.float32), "encoder.final_layer_norm.weight"),
        (np.ones(32, np.int8), "encoder/encoder_norm/scale is int8"),
        (np.ones(32, np.uint16), "encoder/encoder_norm/scale is U16"),
    ],
)
def test_unsuitable_tensors(directory, value, expected):
    path = directory / "model.safetensors"
    tensors = load_file(path) | {"encoder.final_layer_norm.weight": value}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)
    assert_refused(directory, expected)


def test_a_file_without_tensors(directory):
    save_file({}, directory / "model.safetensors")
    assert_refused(directory, "missing")


def test_weights_beside_an_adapter_are_refused(directory):
    (directory / "adapter_config.json").write_text("{}")
    assert_refused(directory, "holds an adapter of a model, which is not read: save the merged")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_weights(made, directory, file):
    if file == "pytorch_model.bin":
        (directory / "model.safetensors").unlink()
        torch.save(made[0].state_dict(), directory / file)
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content[: len(content) // 2])
    assert_refused(directory, f"cannot read the weights in {directory / file}")


def test_a_torch_that_would_run_code_is_not_asked(directory, monkeypatch):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    monkeypatch.setattr(torch, "load", None)
    assert_refused(directory, "whose code PyTorch 2.5.1+cpu would run: pip install")


@pytest.mark.parametrize("values", [{}, {"weight_map": None}, {"weight_map": ["a"]}])
def test_an_index_that_names_no_files(directory, values):
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(values))
    assert_refused(directory, "index.json has no weight_map: copy the file again")


def test_activations_that_transformers_lacks(saved, tmp_path, configs):
    config = dataclasses.replace(configs["1.1"], mlp_activations=("relu", "gelu"))
    edit_config(saved, model=config.to_dict())
    message = message_of(convert, saved, tmp_path / "there", to="huggingface")
    assert "transformers has no T5 with activations ('relu', 'gelu'): it has relu" in message


@pytest.mark.parametrize("name", ["shards/../../{name}", "{directory}/{name}"])
def test_weights_outside_of_the_checkpoint_are_not_read(directory, name):
    # Where the name would lead to.
    name = name.format(directory=directory.parent, name="model.safetensors")
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    index = {"weight_map": {"shared.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(directory, f"names {name!r}, which is outside of the checkpoint")


@pytest.mark.parametrize(
    ("file", "values", "expected"),
    [
        ("added_tokens.json", {"<speaker>": 141}, "gives token '<speaker>' id 141"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"5": 5}},
            "describes no added tokens",
        ),
        ("tokenizer_config.json", {"extra_ids": -1}, ": extra_ids is -1: give at least 0"),
    ],
)
def test_unsuitable_files_beside_the_configuration(directory, file, values, expected):
    (directory / file).write_text(json.dumps(values))
    assert_refused(directory, expected)


UNREAD = [
    "flax_model.msgpack",
    "tf_model.h5",
    "model.fp16.safetensors",
    "last.ckpt",
    "model.gguf",
    "best.pt",
    "pytorch_model_fsdp.bin",
    "pytorch_model.fp16.bin",
    "consolidated.00.pth",
]


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "google/flan-t5-small"}',
            "holds an adapter of google/flan-t5-small, which is not read: save the merged model",
        ),
        ("checkpoint-500/model.safetensors", "", "give the latest, {}/checkpoint-500"),
        *(
            (name, "", "has weights in " + name.partition("/")[0] + ", which is not read")
            for name in UNREAD
        ),
        ("global_step20/mp_rank_00.pt", "", "has weights in global_step20, which is not read"),
        ("pytorch_model_fsdp_0/.metadata", "", "has weights in pytorch_model_fsdp_0, which is no"),
        ("model/config.json", "{}", "has its weights in a folder: give {}/model"),
        ("draft/config.json", "{}", "has its weights in a folder: give {}/draft"),
        ("optimizer.pt", "", None),
        ("rng_state.pth", "", None),
        ("training_args.bin", "", None),
        ("pytorch_model-00001-of-00002.bin", "", None),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_files_in_place_of_weights(directory, file, content, expected, has_config):
    (directory / "model.safetensors").unlink()
    if file.startswith("checkpoint"):
        (directory / "checkpoint-60").mkdir()
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).write_text(content)
    if not has_config:
        (directory / "config.json").unlink()
    nothing = "holds no weights" if has_config else "holds no config.json and no T5X checkpoint"
    assert_refused(directory, expected.format(directory) if expected else nothing)


def test_weights_without_their_configuration(directory):
    (directory / "config.json").unlink()
    assert_refused(directory, "has weights but no config.json: copy their model")


def test_a_link_to_weights_that_are_gone(directory):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(directory / "gone")
    assert_refused(directory, "holds no weights")


def test_an_adapter_among_the_weights(directory):
    path = directory / "model.safetensors"
    names = {name: f"base_model.model.{name}" for name in load_file(path)}
    name = names["shared.weight"].replace("weight", "lora_A.default.weight")
    tensors = {names[n]: tensor for n, tensor in load_file(path).items()}
    save_file(tensors | {name: np.ones((2, 2), np.float32)}, path)
    assert_refused(directory, f"holds an adapter's {name}: save the merged model, merge_and_un")


# A dict that holds itself, as pickle can store it.
ENDLESS: dict = {}
ENDLESS["model"] = ENDLESS
LAYOUTS = """value head, classification head, parameters, state_dict, model_state_dict, module,
a prefix, no archive"""
HEADS = {"value head": "v_head.summary", "classification head": "classification_head.dense"}


@pytest.mark.parametrize("layout", LAYOUTS.replace("\n", " ").split(", "))
def test_weights_as_trainers_save_them(made, directory, layout, caplog):
    path = directory / "model.safetensors"
    state = {name: torch.tensor(tensor) for name, tensor in load_file(path).items()}
    path.unlink()
    if layout == "classification head":
        state = {f"transformer.{name}": tensor for name, tensor in state.items()}
    if layout in HEADS:
        state[f"{HEADS[layout]}.weight"] = torch.ones(1, 32)
    if layout == "parameters":
        state = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}
    if layout == "a prefix":
        state = {f"net.t5.{name}": tensor for name, tensor in state.items()}
    nests = ("state_dict", "model_state_dict", "module")
    nested = {layout: state, "epoch": 3} if layout in nests else state
    # PyTorch before 1.6 wrote no archives.
    options = {"_use_new_zipfile_serialization": layout != "no archive"}
    torch.save(nested, directory / "pytorch_model.bin", **options)
    edit_config(directory, quantization_config=None)
    assert_same_logits(load(directory), made[0])
    named = [f"{directory} has a head, which decoding ignores: {HEADS.get(layout)}.weight"]
    assert caplog.messages == (named if layout in HEADS else [])


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"model_ema": {"shared.weight": torch.ones(1)}}, "has 'model_ema', which is no tensor"),
        ({"shared.weight": torch.ones(1), "epoch": 3}, "has 'epoch', which is no tensor: save mod"),
        ({1: torch.ones(1)}, "has 1, which is no tensor"),
        (
            {name: {"shared.weight": torch.ones(1)} for name in ("model_ema", "model")}
            | {"optimizer": {"state": {}}, "args": {"lr": 1.0}},
            "has weights in 'model' and in 'model_ema'",
        ),
        (ENDLESS, "has 'model', which is no tensor"),
        (torch.nn.Linear(1, 1), "cannot read the weights in"),
        # It would run code.
        ({"shared.weight": print}, "cannot read the weights in"),
    ],
)
def test_torch_files_of_other_objects_than_tensors(directory, state, expected):
    (directory / "model.safetensors").unlink()
    torch.save(state, directory / "pytorch_model.bin")
    message = message_of(load, directory)
    assert expected in message and "save model.state_dict() there" in message
    # PyTorch's own message has colours.
    assert message.isprintable()


def test_a_decoder_of_another_module_than_its_output_layer_is_one(directory):
    path = directory / "model.safetensors"
    head = {"lm_head.weight": load_file(path)["shared.weight"]}
    save_file({f"model.{n}": t for n, t in load_file(path).items()} | head, path)
    assert_refused(directory, "unexpected (model.decoder.block.0.layer.0.SelfAttention.k.weight")


def test_an_encoder_whose_configuration_is_of_both(directory):
    path = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not n.startswith("decoder.")}
    save_file(tensors, path)
    assert_refused(directory, "holds no decoder: give a whole encoder-decoder")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (weight_files.WEIGHTS, ["model.safetensors"]),
        (weight_files.WEIGHTS[1:], ["one.part", "two.part"]),
        (weight_files.TORCH_WEIGHTS, ["pytorch_model.bin"]),
        (weight_files.TORCH_WEIGHTS[1:], ["one.part", "two.part"]),
    ],
)
def test_of_several_files_of_weights_the_first_by_preference_is_read(tmp_path, names, expected):
    shards = {"weight_map": {"a": "two.part", "b": "one.part", "c": "two.part"}}
    for name in (*names, "one.part", "two.part"):
        (tmp_path / name).write_text(json.dumps(shards))
    assert [path.name for path in weight_files.find_files(tmp_path)] == expected


def test_missing_files(directory):
    (directory / "spiece.model").unlink()
    assert_refused(
        directory, "holds no vocabulary: give one (--vocabulary), a tokenizer.json or spiece.model"
    )
    (directory / "model.safetensors").unlink()
    assert_refused(directory, "holds no weights")
