"""Checkpoints by name: huggingface_hub's own code, with a cache and a Hub on this machine."""

import builtins
import hashlib
import io
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.digests import files_digest
from spec_t5x.checkpoints.huggingface import hub, weight_files
from spec_t5x.checkpoints.loading import (
    find_directory,
    load,
    load_vocabulary,
    named_vocabulary,
    open_model,
)
from spec_t5x.checkpoints.make_draft import find_models
from spec_t5x.checkpoints.named_models import Models
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.cli import main
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from tests.checkpoints.faults import edit_config, message_of
from tests.checkpoints.hub_server import add_to_cache, commit_of, serving

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["Die Katze schläft.", "We are going to the station tomorrow."]
TARGET, DRAFT = "owner/target", "owner/draft"


@pytest.fixture(scope="module")
def directories(tmp_path_factory, tiny_pair):
    """Provides ``target`` and ``draft`` of the tiny pair, as transformers writes them."""
    root = tmp_path_factory.mktemp("theirs")
    for name in ("target", "draft"):
        converted = root / "converted" / name
        convert(tiny_pair / name, converted, to="huggingface")
        model = transformers.T5ForConditionalGeneration.from_pretrained(converted)
        model.save_pretrained(root / name)
        transformers.AutoTokenizer.from_pretrained(converted).save_pretrained(root / name)
    # One with either file of a vocabulary.
    (root / "target" / "tokenizer.json").unlink()
    shutil.copy(tiny_pair / "target" / "spiece.model", root / "target")
    return root


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Provides an empty cache of the Hub; this machine has no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.snapshot.cache_clear()
    yield tmp_path / "cache"
    hub.snapshot.cache_clear()


@pytest.fixture
def cached(cache, directories):
    """Provides a cache with both models."""
    for name, directory in ((TARGET, "target"), (DRAFT, "draft")):
        add_to_cache(cache, name, directories / directory)
    return cache


@pytest.fixture
def online(cache, directories, monkeypatch, tmp_path):
    """Provides a Hub with both models and an empty cache; what the Hub has may be spoiled."""
    shutil.copytree(directories / "target", tmp_path / "hub" / "target")
    shutil.copytree(directories / "draft", tmp_path / "hub" / "draft")
    with serving() as served:
        served.repositories = {
            TARGET: tmp_path / "hub" / "target",
            DRAFT: tmp_path / "hub" / "draft",
        }
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


@pytest.fixture
def unloadable(monkeypatch):
    """Lets no model be loaded: a refusal has to come before."""

    def load_none(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(StoredModel, "load", load_none)


def generated(target, draft):
    generator = Generator.load(target, draft)
    outputs = generator.generate(TEXTS, GenerateOptions(gamma=3, max_decode_len=16))
    return [output[0].output_ids for output in outputs]


def test_names_are_the_directories(cached, directories):
    ours = generated(TARGET, DRAFT)
    assert ours == generated(str(directories / "target"), str(directories / "draft"))
    assert any(ours)
    assert load_vocabulary(TARGET).fingerprint() == load_vocabulary(DRAFT).fingerprint()
    assert isinstance(load_vocabulary(DRAFT), UnigramVocabulary)


def test_an_adapter(cache, tmp_path):
    (folder := tmp_path / "adapter").mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "google/flan-t5-xl"}')
    add_to_cache(cache, "owner/adapter", folder)
    message = message_of(find_directory, "owner/adapter")
    assert message.startswith(
        "owner/adapter holds an adapter of google/flan-t5-xl, which is not read"
    )


def test_an_adapter_beside_weights_is_named_before_they_are_downloaded(cached):
    directory = find_directory(TARGET)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "model.safetensors").unlink()
    message = message_of(find_models, TARGET, ())
    assert message.startswith(f"{TARGET} holds an adapter of a model, which is not read: save")


def test_a_commit(cached, directories):
    commit = commit_of(directories / "target")
    assert find_directory(f"{TARGET}@{commit}") == find_directory(TARGET)
    assert find_directory(TARGET).name == commit
    message = message_of(find_directory, f"{TARGET}@v2")
    assert f"run `hf download {TARGET} --revision v2`" in message


def test_a_vocabulary_takes_no_weights(cached):
    (find_directory(TARGET) / "model.safetensors").unlink()
    assert named_vocabulary(TARGET).fingerprint() == load_vocabulary(DRAFT).fingerprint()


def test_converting_a_name(cached, tmp_path, directories):
    convert(DRAFT, tmp_path / "ours", to="native")
    kept = (tmp_path / "ours" / "tokenizer.json").read_bytes()
    assert kept == (directories / "draft" / "tokenizer.json").read_bytes()
    assert load(tmp_path / "ours").config == load(DRAFT).config


def test_a_directory_comes_first(cached, directories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(directories / "draft", tmp_path / TARGET)
    assert find_directory(TARGET) == Path(TARGET)
    assert load(TARGET).config == load(DRAFT).config
    # A path is none on the Hub.
    assert "no directory owner/draft" in message_of(find_directory, Path(DRAFT))


def test_digests_are_of_commits(cached, directories, tmp_path):
    commit = commit_of(directories / "target")
    first = files_digest(TARGET)
    assert first["name"] == TARGET
    assert files_digest(f"{TARGET}@{commit}")["content"] == first["content"]
    assert len(first["content"]) == len(hashlib.sha256().hexdigest())
    assert files_digest(DRAFT)["content"] != first["content"]
    draft = files_digest(f"mixed:{DRAFT}")["content"]
    assert draft == f"mixed:{files_digest(DRAFT)['content']}"
    # What others download of the same commit makes no difference; another commit does.
    (find_directory(TARGET) / "tf_model.h5").write_text("theirs")
    assert files_digest(TARGET) == first
    shutil.copytree(directories / "target", tmp_path / "later")
    (tmp_path / "later" / "README.md").write_text("later")
    add_to_cache(cached, TARGET, tmp_path / "later")
    hub.snapshot.cache_clear()
    assert files_digest(TARGET)["content"] != first["content"]


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("draft", ["owner/none", "transformer:owner/none", "mixed:owner/none"])
def test_a_draft_that_is_not_there_is_refused_first(cached, draft):
    message = message_of(Generator.load, TARGET, draft)
    assert "owner/none is no directory here and not complete in" in message
    assert "HF_HUB_OFFLINE is set" in message
    assert message.endswith(
        "run `hf download owner/none` where there is a network, or give a directory"
    )


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    "words",
    [
        "generate text --target {target} --draft {draft}",
        "acceptance text --target {target} --draft {draft}",
        "benchmark --target {target} --draft {draft} --data {data}",
        "evaluate --target {target} --draft {draft} --data {data}",
        "infer --target {target} --draft {draft} --input {data} --output_dir {output}",
        "convert {draft} {output} --to native",
        "train-ngram --vocabulary {draft} --data {data} --output {output}",
        "distill --gin_file=gin_configs/runs/distill_draft.gin --gin.CHECKPOINT_PATH='{draft}' "
        "--gin.DATA_DIR=. --gin.TRAIN_FILE={data} --gin.DEV_FILE={data} --gin.OUTPUT_DIR={output}",
    ],
    ids=lambda words: words.split()[0],
)
def test_every_command_takes_names(cached, tmp_path, capsys, words):
    (tmp_path / "pairs.tsv").write_text("source\ttarget\n")
    places = {"data": tmp_path / "pairs.tsv", "output": tmp_path / "output"}
    names = {"target": TARGET, "draft": "owner/none"}
    assert main.main([word.format(**names, **places) for word in words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spec-t5x: error: owner/none is no directory here and not complete in")
    assert not places["output"].exists()


@pytest.mark.usefixtures("unloadable")
def test_half_of_a_model_in_the_cache(cached):
    (find_directory(DRAFT) / "model.safetensors").unlink()
    assert f"run `hf download {DRAFT}`" in message_of(Generator.load, TARGET, DRAFT)
    (find_directory(DRAFT) / "config.json").unlink()
    hub.snapshot.cache_clear()
    assert f"{DRAFT} has no config.json" in message_of(Generator.load, TARGET, DRAFT)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flan-t5-small", "no directory flan-t5-small: give the path of a checkpoint, OWNER/NAME"),
        ("a/b/c", "no directory a/b/c: give the path"),
        ("./owner/none", "no directory ./owner/none: give the path"),
        ("owner/a--b", "owner/a--b is no directory here and no name of the Hub"),
    ],
)
def test_what_is_no_name(cache, name, expected):
    assert expected in message_of(find_directory, name)


def test_a_missing_file_is_no_name(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data/spiece.model", "data/tokenizer.json"):
        assert f"no vocabulary at {name}" in message_of(named_vocabulary, name)


def test_download(online, directories, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="spec_t5x")
    repository = online.repositories[TARGET]
    for name in ("pytorch_model.bin", "tf_model.h5", "README.md", "optimizer.pt"):
        (repository / name).write_text("not needed")
    small = {"added_tokens.json", "special_tokens_map.json", "tokenizer.4.0.0.json"}
    for name in small:
        # Different contents, because the cache downloads equal files once.
        (repository / name).write_text("{}" + " " * len(name))
    find_models(TARGET, [DRAFT])
    names = {path.name for path in (directories / "target").iterdir()} | small
    needed = {f"{TARGET}/{name}" for name in names}
    needed |= {f"{DRAFT}/{path.name}" for path in (directories / "draft").iterdir()}
    assert "owner/target/model.safetensors" in needed
    assert sorted(online.sent) == sorted(needed)
    for name in (TARGET, DRAFT):
        assert caplog.messages.count(f"downloading {name} to the Hub's cache, once") == 1
    # From now on without a network.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.snapshot.cache_clear()
    assert generated(TARGET, DRAFT) == generated(directories / "target", directories / "draft")
    assert sorted(online.sent) == sorted(needed)


def test_vocabularies_are_compared_before_a_download(online, directories, tiny_pair):
    file = online.repositories[DRAFT] / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"][20][0] = "otherwise"
    file.write_text(json.dumps(values))
    for target in (TARGET, str(directories / "target"), str(tiny_pair / "target")):
        message = message_of(find_models, target, [f"mixed:{DRAFT}"])
        assert f"target {target} and draft {DRAFT} have different vocabularies (" in message
    assert not [name for name in online.sent if name.endswith(".safetensors")]


def test_a_missing_vocabulary_is_named_before_a_download(online, tmp_path):
    absent = str(tmp_path / "other.model")
    message = message_of(Generator.load, TARGET, DRAFT, vocabulary=absent)
    assert f"no vocabulary at {absent}" in message
    (online.repositories[TARGET] / "spiece.model").unlink()
    hub.snapshot.cache_clear()
    shutil.rmtree(constants.HF_HUB_CACHE)
    message = message_of(Generator.load, TARGET, DRAFT)
    assert message.startswith(f"{TARGET} holds no vocabulary: give one")
    assert not [name for name in online.sent if name.endswith(".safetensors")]


OPTIONS_OF_NO_TARGET = [
    ({"suppress_tokens": (10**6,)}, {}, "suppress_tokens has token 1000000 and the model"),
    ({"min_decode_len": 129}, {}, "min_decode_len is 129 and outputs have at most 128"),
    (
        {"beams": 2, "early_stopping": True},
        {},
        "early_stopping is True, which T5X's ranking does not use",
    ),
    ({}, {"draft": "early_exit:99"}, "early exit after 99 of 2 decoder layers: give 1 to 1"),
    ({}, {"draft": "mixed:early_exit:2"}, "early exit after 2 of 2 decoder layers"),
    ({}, {"draft": "t5-eagle"}, "draft layers .* are for"),
    ({}, {"draft": "bigram:t5-ngram"}, "have different vocabularies"),
    ({}, {"vocabulary": "bytes"}, "already holds a vocabulary"),
    ({}, {"task": "none"}, "has no settings of a task 'none'"),
]


@pytest.mark.parametrize(("options", "models", "message"), OPTIONS_OF_NO_TARGET)
def test_what_small_files_decide_is_checked_before_a_download(online, options, models, message):
    models = Models(**{"target": TARGET, "draft": DRAFT} | models)
    with pytest.raises(InputError, match=message) as raised:
        Generator.open(models, [models.draft], GenerateOptions(**options))
    assert constants.HF_HUB_CACHE not in str(raised.value)
    assert f"{TARGET}/config.json" in online.sent
    assert not [name for name in online.sent if name.endswith(".safetensors")]


@pytest.mark.parametrize("command", ["generate", "acceptance"])
def test_texts_are_encoded_before_a_download(online, capsys, command):
    limit = ["--max_source_len", "4"]
    for texts, message in ((["a cat", "a " * 9], "the encoder takes 4"), ([" "], "is empty")):
        assert main.main([command, *texts, "--target", TARGET, "--draft", DRAFT, *limit]) == 2
        assert message in capsys.readouterr().err
    assert f"{TARGET}/config.json" in online.sent
    assert not [name for name in online.sent if name.endswith(".safetensors")]


def test_bars_are_for_a_terminal(online, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    # At the end the target is in the cache.
    for stream, name, shown in (
        (io.StringIO(), TARGET, False),
        (Terminal(), DRAFT, True),
        (Terminal(), TARGET, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        find_models(name, ())
        assert ("%|" in stream.getvalue()) == shown


def test_bars_are_for_notebooks_too(online, monkeypatch):
    class ZMQInteractiveShell:
        """Stand-in for the shell of a kernel, whose streams are no terminals."""

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    find_models(TARGET, ())
    assert "%|" in stream.getvalue()


def test_the_network_fails(online, monkeypatch):
    find_models(TARGET, ())
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.snapshot.cache_clear()
    find_models(TARGET, ())
    message = message_of(find_models, TARGET, [DRAFT])
    assert f"refused): run `hf download {DRAFT}`" in message


def test_weights_are_of_the_configurations_commit_if_the_branch_moves(online, tmp_path):
    found, repository = find_directory(DRAFT), online.repositories[DRAFT]
    shutil.copytree(repository, tmp_path / "later")
    (tmp_path / "later" / "model.safetensors").rename(tmp_path / "later" / "pytorch_model.bin")
    online.earlier[found.name], online.repositories[DRAFT] = repository, tmp_path / "later"
    find_models(TARGET, [DRAFT])
    weights = "model.safetensors"
    assert (found / weights).read_bytes() == (repository / weights).read_bytes()


def test_shards(online, directories, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 20_000)
    repository = online.repositories[TARGET]
    shutil.rmtree(repository)
    convert(directories / "target", repository, to="huggingface")
    assert len(list(repository.glob("*.safetensors"))) > 2
    (repository / "model-00001-of-00009.bin").write_text("not needed")
    (repository / "other.safetensors").write_text("not needed")
    assert load(TARGET).config == load(directories / "target").config
    sent = [name for name in online.sent if name.endswith((".safetensors", ".bin"))]
    index = json.loads((repository / "model.safetensors.index.json").read_text())
    assert sorted(sent) == sorted(f"{TARGET}/{name}" for name in set(index["weight_map"].values()))


def test_a_shard_that_a_repository_lacks(online, directories, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 20_000)
    repository = online.repositories[DRAFT]
    shutil.rmtree(repository)
    convert(directories / "draft", repository, to="huggingface")
    lost = sorted(repository.glob("model-*.safetensors"))[-1]
    lost.unlink()
    message = f"{DRAFT} has no {lost.name}, which model.safetensors.index.json lists: give"
    for read in (load, open_model, lambda name: find_models(TARGET, [name])):
        assert message in message_of(read, DRAFT)
    assert not [name for name in online.sent if name.endswith(".safetensors")]
    # It can be opened without weights, and then has none to read.
    stored = open_model(DRAFT, downloads=False)
    assert "was opened without weights" in message_of(stored.read_params, dtype="float32")


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("listed", ["*", "*.msgpack", "."])
def test_an_index_lists_names_and_no_patterns(online, index, listed):
    repository = online.repositories[DRAFT]
    (repository / "model.safetensors").unlink()
    (repository / "flax_model.msgpack").write_text("not needed")
    (repository / index).write_text(json.dumps({"weight_map": {"shared.weight": listed}}))
    message = message_of(find_models, TARGET, [DRAFT])
    assert f"{DRAFT} has no {listed}, which {index} lists: give a whole repository" == message
    assert f"{DRAFT}/flax_model.msgpack" not in online.sent


def test_errors_and_warnings_name_models_as_they_were_given(online, caplog, capsys):
    name = f"{DRAFT}@main"
    settings = online.repositories[DRAFT] / "generation_config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"num_beams": 3, "max_length": 5}))
    Generator.load(name).generate(TEXTS[0])[0]
    (line,) = [line for line in caplog.messages if "not applied" in line]
    assert line.startswith(f"{name} sets options that are not applied: num_beams 3")
    weights = find_directory(name) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:999])
    for read in (load, load_vocabulary, lambda name: find_models(TARGET, [name])):
        message = message_of(read, name)
        assert message.startswith(f"cannot read the weights in {name}/model.safetensors (")
    # In a directory of the same files nothing is named so.
    assert str(online.repositories[TARGET]) in message_of(
        find_models, online.repositories[TARGET], ["eagle:t5-eagle"]
    )


def test_a_model_that_is_its_own_draft_is_downloaded_once(online, caplog):
    caplog.set_level(logging.INFO, logger="spec_t5x")
    find_models(DRAFT, [DRAFT])
    assert caplog.messages.count(f"downloading {DRAFT} to the Hub's cache, once") == 1


def test_a_target_without_texts_to_measure_is_not_downloaded(online, capsys):
    assert main.main(["acceptance", "--target", TARGET, "--draft", "copy"]) == 2
    assert "there is no text: give TEXT, --data FILE or" in capsys.readouterr().err
    assert not [name for name in online.sent if name.endswith(".safetensors")]


def test_what_no_command_could_read_or_write_is_named_before_a_download(online, tmp_path, capsys):
    (online.repositories[TARGET] / "spiece.model").unlink()
    output = tmp_path / "checkpoint_1"
    commands = {
        "convert {0} {1} --to t5x --vocabulary {2}/no.model": "no vocabulary at",
        "infer --target {0} --draft copy --input {2}/no.txt --output_dir {1}": "no.txt",
    }
    for command, message in commands.items():
        assert main.main([word.format(TARGET, output, tmp_path) for word in command.split()]) == 2
        assert message in capsys.readouterr().err
    assert not [name for name in online.sent if name.endswith(".safetensors")]


def test_a_target_that_a_format_cannot_store_is_not_downloaded(online, tmp_path):
    ids = {"decoder_start_token_id": 5, "eos_token_id": 1, "pad_token_id": 0}
    (online.repositories[TARGET] / "generation_config.json").write_text(json.dumps(ids))
    message = message_of(convert, TARGET, tmp_path / "checkpoint_1", to="t5x")
    assert "has other special ids than T5's, which t5x cannot store" in message
    assert not [name for name in online.sent if name.endswith(".safetensors")]


def test_an_index_without_names(online):
    repository = online.repositories[TARGET]
    (repository / "model.safetensors").unlink()
    (repository / "model.safetensors.index.json").write_text('{"weight_map": null}')
    message = message_of(find_models, TARGET, ())
    # Not "copy the file again": the message names no file on the disk.
    assert message.endswith(f"no weight_map: run `hf download {TARGET} --force-download`")


def test_weights_of_pytorch(online, directories, monkeypatch):
    repository = online.repositories[DRAFT]
    model = transformers.T5ForConditionalGeneration.from_pretrained(directories / "draft")
    (repository / "model.safetensors").unlink()
    torch.save(model.state_dict(), repository / "pytorch_model.bin")
    assert load(DRAFT).config == load(directories / "draft").config
    # Without PyTorch it need not be downloaded.
    shutil.copytree(repository, online.repositories[TARGET], dirs_exist_ok=True)
    (online.repositories[TARGET] / "model.safetensors").unlink()
    monkeypatch.setitem(sys.modules, "torch", None)
    message = message_of(load, TARGET)
    assert f"{TARGET}: pytorch_model.bin needs PyTorch to be read" in message
    assert f"{TARGET}/pytorch_model.bin" not in online.sent


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ("owner/absent", "owner/absent is no directory here and no repository at"),
        ("owner/private", "owner/private is no directory here and no repository at"),
        ("owner/gated", "owner/gated is gated: accept its terms at http"),
        (f"{DRAFT}@v7", "owner/draft has no revision 'v7': give a branch, a tag or a commit"),
        ("owner/broken", "owner/broken is no directory here and not complete in"),
    ],
)
def test_what_the_hub_refuses(online, draft, expected):
    assert expected in message_of(Generator.load, TARGET, draft)
    # Nor were any weights downloaded.
    assert not any("safetensors" in name for name in online.sent)


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "bert"}, "has model_type 'bert': give a T5"),
        (
            {"format": "spec_t5x"},
            "a checkpoint of spec_t5x: run `hf download owner/draft --local-dir",
        ),
        ({"format": "other", "model_type": None}, "has model_type None"),
        # As sentence-t5 has it, beside is_encoder_decoder.
        ({"architectures": ["T5EncoderModel"]}, "is an encoder-only model: give an encoder-deco"),
        ({"architectures": ["MT5ForTokenClassification"]}, "is an encoder-only model: give an enc"),
    ],
)
def test_what_is_no_t5(online, values, expected):
    edit_config(online.repositories[DRAFT], **values)
    message = message_of(Generator.load, TARGET, DRAFT)
    assert message.startswith(DRAFT) and expected in message
    assert not any("safetensors" in name for name in online.sent)


@pytest.mark.usefixtures("unloadable")
def test_repositories_that_lack_something(online):
    (online.repositories[DRAFT] / "model.safetensors").unlink()
    message = message_of(Generator.load, TARGET, DRAFT)
    assert "owner/draft has neither safetensors nor a pytorch_model.bin" in message
    # Nor are the target's weights downloaded before the draft's are found.
    assert f"{TARGET}/model.safetensors" not in online.sent
    index = online.repositories[DRAFT] / "model.safetensors.index.json"
    index.write_text('{"weight_map": ["model.safetensors"]}')
    hub.snapshot.cache_clear()
    assert "index.json has no weight_map: run `hf" in message_of(Generator.load, TARGET, DRAFT)
    index.unlink()
    (online.repositories[DRAFT] / "config.json").unlink()
    hub.snapshot.cache_clear()
    assert "owner/draft has no config.json" in message_of(Generator.load, TARGET, DRAFT)
