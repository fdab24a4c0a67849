"""GPT-2 directories: logits and greedy texts equal those of transformers."""

import json
import shutil

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from spec_t5x.checkpoints.huggingface import hub
from spec_t5x.checkpoints.loading import load, load_vocabulary
from spec_t5x.cli.main import main
from spec_t5x.contrib.lm.gpt import GPTConfig
from spec_t5x.contrib.lm.gpt2 import read_two_files, read_vocabulary
from spec_t5x.data.mapped_vocabulary import MappedVocabulary, their_ids
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.training.exports import save_model
from spec_t5x.models.binding import bind
from tests.checkpoints.faults import edit_config
from tests.checkpoints.hub_server import add_to_cache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation")

NUM_IDS, POSITIONS, EOS = 300, 40, 299
RNG = np.random.default_rng(0)
# Theirs: the token that starts, then others; id 0 is a token like any.
THEIRS = np.concatenate([np.full((3, 1), EOS), RNG.integers(0, EOS, (3, 16))], axis=1)


def their_model(**changes):
    """Makes a GPT-2 of random weights and biases."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
    special = {"bos_token_id": EOS, "eos_token_id": EOS}
    config = transformers.GPT2Config(vocab_size=NUM_IDS, **sizes, **special, **changes)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def save_tokenizer(directory):
    """Saves a byte-level BPE, with GPT-2's only special token at the end."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 50, vocab_size=EOS, min_frequency=2)
    pieces = tokenizer.get_vocab()
    filler = (f"<filler {i}>" for i in range(NUM_IDS))
    while len(pieces) < EOS:
        pieces[next(filler)] = len(pieces)
    pieces["<|endoftext|>"] = EOS
    (directory / "vocab.json").write_text(json.dumps(pieces))
    tokenizer.save_model(str(directory), "bpe")
    (directory / "bpe-merges.txt").rename(directory / "merges.txt")
    (directory / "bpe-vocab.json").unlink()


@pytest.fixture(scope="module")
def theirs():
    return their_model()


@pytest.fixture(scope="module")
def directory(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(path)
    save_tokenizer(path)
    return path


def their_logits(model):
    with torch.no_grad():
        return model(torch.as_tensor(THEIRS)).logits.numpy()


def our_logits(loaded):
    """Returns logits of the same texts by their ids, from two cached calls."""
    ours = np.argsort(their_ids(NUM_IDS, EOS, EOS)[1:]) + 1
    tokens = jnp.asarray(np.concatenate([np.zeros((3, 1)), ours[THEIRS[:, 1:]]], 1), jnp.int32)
    model = bind(loaded.params, loaded.config)
    cache = model.prefill(jnp.ones((3, 1), jnp.int32), POSITIONS)
    first, _, cache = model.score(cache, tokens[:, :5])
    second, *_ = model.score(cache, tokens[:, 5:])
    return np.concatenate([first, second], axis=1)[:, :, ours]


def test_logits_equal_those_of_transformers(theirs, directory):
    loaded = load(directory)
    assert isinstance(loaded.config, GPTConfig)
    # The scale of the weights makes logits of several units.
    assert np.std(their_logits(theirs)) > 1
    np.testing.assert_allclose(our_logits(loaded), their_logits(theirs), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("file", "prefix"), [("model.safetensors", ""), ("pytorch_model.bin", "transformer.")]
)
def test_every_layout_of_the_weights_is_read(directory, tmp_path, file, prefix):
    tensors = load_file(directory / "model.safetensors")
    named = {prefix + name.removeprefix("transformer."): t for name, t in tensors.items()}
    # Releases before 2023 stored masks as well.
    named[f"{prefix}h.0.attn.bias"] = np.ones((1, 1, POSITIONS, POSITIONS), np.uint8)
    if prefix:
        named["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    if file == "model.safetensors":
        save_file(named, tmp_path / file)
    else:
        torch.save({name: torch.as_tensor(t) for name, t in named.items()}, tmp_path / file)
    for name in ("config.json", "vocab.json", "merges.txt"):
        shutil.copy(directory / name, tmp_path)
    expected, found = load(directory), load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, expected.params, found.params)


def test_the_vocabulary_gives_back_the_text(directory):
    vocabulary = load_vocabulary(directory)
    text = "the cat sat <|endoftext|> ü"
    ids = vocabulary.encode(text)
    assert min(ids) >= 2
    assert vocabulary.decode([*ids, 1, 5]) == text
    assert [vocabulary.piece(i) for i in (0, 1)] == ["<|endoftext|>"] * 2
    assert vocabulary.vocab_size == NUM_IDS + 1


@pytest.fixture
def cached(directory, tmp_path, monkeypatch):
    """Provides the model without its weights in a cache of the Hub, where there is no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    weights = shutil.ignore_patterns("*.safetensors")
    copy = shutil.copytree(directory, tmp_path / "gpt2", ignore=weights)
    hub.snapshot.cache_clear()
    yield copy, lambda: add_to_cache(tmp_path / "cache", "owner/gpt2", copy)
    hub.snapshot.cache_clear()


def test_a_vocabulary_of_the_hub_takes_no_weights(cached, directory):
    _, add = cached
    add()
    ours = load_vocabulary("owner/gpt2")
    assert ours.fingerprint() == load_vocabulary(directory).fingerprint()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda copy: (copy / "vocab.json").unlink(),
            "^owner/gpt2 holds no vocabulary: give one",
        ),
        (lambda copy: edit_config(copy, add_cross_attention=True), "add_cross_attention"),
    ],
)
def test_what_cannot_be_read_is_named_before_a_download(cached, spoil, message):
    copy, add = cached
    spoil(copy)
    add()
    with pytest.raises(InputError, match=message):
        Generator.load("owner/gpt2")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("Models.kv='int8'", "kv is 'int8' and the model has no source: leave"),
        ("Models.draft='eagle:absent'", "draft 'eagle:absent' is for encoder-decoders"),
        ("GenerateOptions.output_prefix='a'", "prefix is 'a' and a decoder-only model's prompt"),
    ],
)
def test_what_a_decoder_alone_lacks_is_named_before_a_download(cached, capsys, option, message):
    cached[1]()
    words = ["generate", "x", "--target", "owner/gpt2", f"--gin.{option}"]
    assert main([*words, *["--draft", "copy"] * ("draft" not in option)]) == 2
    assert message in capsys.readouterr().err
    gin.clear_config()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("added_tokens.json", {"<sep>": NUM_IDS}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"60": {"content": "<sep>"}}}),
    ],
)
def test_tokens_that_only_transformers_adds_are_refused(directory, tmp_path, name, values):
    """Their text would become the ids of its bytes."""
    place = shutil.copytree(directory, tmp_path / "model")
    # The end of text is in vocab.json already.
    (place / "added_tokens.json").write_text(json.dumps({"<|endoftext|>": EOS}))
    load(place)
    (place / name).write_text(json.dumps(values))
    with pytest.raises(InputError, match="lacks the added token '<sep>': save it with its tok"):
        load(place)


@pytest.mark.parametrize("kind", [None, "GPT2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("adds", [None, False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "config.json"])
def test_a_space_before_a_text(directory, tmp_path, kind, adds, added, place):
    """The settings or, with another class, tokenizer.json add the space."""
    made = transformers.GPT2Tokenizer.from_pretrained(directory, add_prefix_space=added)
    made.save_pretrained(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    files = {"tokenizer_config.json": {"add_prefix_space": adds}, "config.json": config}
    files[place]["tokenizer_class"] = kind
    for name, values in files.items():
        given = {key: value for key, value in values.items() if value is not None}
        (tmp_path / name).write_text(json.dumps(given))
    ours = read_vocabulary(tmp_path, config)
    ids = ours.to_theirs(ours.encode("the cat"))
    assert ids == transformers.AutoTokenizer.from_pretrained(tmp_path)("the cat").input_ids


@pytest.mark.parametrize("kind", ["CodeGenTokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizerFast"])
def test_a_tokenizer_of_another_class_is_read_by_transformers(directory, tmp_path, kind):
    made = transformers.GPT2Tokenizer.from_pretrained(directory, add_prefix_space=False)
    made.save_pretrained(tmp_path)
    settings = {"tokenizer_class": kind, "add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(directory / "config.json", tmp_path)
    ours = read_vocabulary(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs("the cat", add_special_tokens=False).input_ids
    assert ours.to_theirs(ours.encode("the cat")) == expected


def test_the_class_of_gpt2_replaces_the_steps_of_a_file(directory, tmp_path):
    transformers.GPT2Tokenizer.from_pretrained(directory).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = read_vocabulary(tmp_path, config)
    ids = ours.to_theirs(ours.encode("THE cat"))
    assert ids == transformers.AutoTokenizer.from_pretrained(tmp_path)("THE cat").input_ids


def test_a_tokenizer_in_the_directory_above(directory, tmp_path):
    inner = shutil.copytree(directory, tmp_path / "checkpoint-5")
    for name in ("vocab.json", "merges.txt"):
        (inner / name).rename(tmp_path / name)
    assert load_vocabulary(inner).fingerprint() == load_vocabulary(directory).fingerprint()


def test_truncation_and_padding_of_the_tokenizer_are_switched_off(directory):
    tokenizer, expected = read_two_files(directory), load_vocabulary(directory)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    vocabulary = MappedVocabulary(tokenizer, num_ids=NUM_IDS, start_id=EOS, eos_id=EOS)
    assert vocabulary.encode("the cat sat") == expected.encode("the cat sat")


def test_speculative_texts_equal_the_greedy_ones_of_transformers(theirs, directory, tmp_path):
    loaded = load(directory)
    save_model(tmp_path / "own", loaded.params, loaded.config, loaded.vocabulary, dtype="float32")
    texts, vocabulary = ["the cat", ""], loaded.vocabulary
    answers = Generator.load(tmp_path / "own", "copy").generate(
        texts, GenerateOptions(max_decode_len=10, batch_size=2)
    )
    for text, (answer,) in zip(texts, answers, strict=True):
        prompt = torch.as_tensor([[EOS, *vocabulary.to_theirs(vocabulary.encode(text))]])
        with torch.no_grad():
            expected = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=10,
                do_sample=False,
                pad_token_id=EOS,
            )[0, prompt.shape[1] :].tolist()
        found = vocabulary.to_theirs(answer.output_ids)
        assert found == expected[: len(found)]
        assert len(found) == 10 or found[-1] == EOS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu': supported are"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"is_causal": None}, "has is_causal None: give a model without it"),
        ({"transformers_weights": "a.safetensors"}, "transformers_weights 'a.safetensors': rename"),
        ({"quantization_config": {}}, "config.json is quantized: give float32"),
        ({"eos_token_id": NUM_IDS}, f"eos_token_id {NUM_IDS} and vocab_size"),
        ({"eos_token_id": True}, "eos_token_id True and vocab_size"),
        ({"n_layer": 3}, "missing"),
        ({"n_head": 0}, "config.json: n_head is 0: give at least 1"),
        ({"n_inner": -1}, "config.json: n_inner is -1: give at least 1"),
        ({"n_positions": 0}, "config.json: n_positions is 0: give at least 1"),
        ({"n_embd": None}, "has no n_embd"),
        ({"num_attention_heads": 2}, "has num_attention_heads 2 and n_head 4: leave out one"),
        ({"num_hidden_layers": 1}, "has num_hidden_layers 1 and n_layer 2: leave out one"),
        ({"max_position_embeddings": 9}, "has max_position_embeddings 9 and n_positions 40: leave"),
        ({"hidden_size": 16}, "has hidden_size 16 and n_embd 32: leave out one"),
        ({"sliding_window": 3}, "has sliding_window 3: give a model without it"),
        ({"attention_chunk_size": 3}, "has attention_chunk_size 3: give a model without it"),
    ],
)
def test_a_wrong_configuration_is_one_line(directory, tmp_path, changes, message):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    values = json.loads((directory / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    # Its ids would come first.
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(InputError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_the_weights_that_are_read_may_be_named(directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    values = json.loads((directory / "config.json").read_text())
    named = {"transformers_weights": "model.safetensors", "is_encoder_decoder": False}
    (tmp_path / "config.json").write_text(json.dumps(values | named))
    assert load(tmp_path).config == load(directory).config


def test_ids_of_generation_config_come_first(directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    said = {"bos_token_id": 5, "eos_token_id": [7, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    vocabulary = load(tmp_path).vocabulary
    assert (vocabulary.start_id, vocabulary.eos_id, vocabulary.more_eos_ids) == (5, 7, (9,))


def test_a_stored_output_layer_is_used_even_if_config_json_ties_it(directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    stored = load_file(directory / "model.safetensors")
    rows = stored["transformer.wte.weight"]
    head = np.random.default_rng(0).normal(0, 0.1, rows.shape).astype(np.float32)
    save_file(stored | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    loaded = load(tmp_path)
    assert not loaded.config.logits_via_embedding
    np.testing.assert_allclose(our_logits(loaded), their_logits(model), atol=2e-4)
