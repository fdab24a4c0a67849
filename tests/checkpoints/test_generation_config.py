"""Decoding settings of a Hugging Face directory: the text of transformers' own ``generate``."""

import json
import logging
import shutil

import numpy as np
import pytest

from spec_t5x.checkpoints.convert import convert
from spec_t5x.checkpoints.huggingface.generation_config import GENERATION_NAME, options_of
from spec_t5x.checkpoints.loading import load_vocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from tests.checkpoints.test_huggingface import add_vocabulary
from tests.checkpoints.test_special_ids import FAMILIES, NUM_IDS, TEXTS, tokenizer_of
from tests.torch_t5 import SIZES, enlivened

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

NEW = 14
SENTENCES = ["The cat sleeps under the table.", "A green bird.", "Nobody knows where the keys are."]
LENGTH = {"max_new_tokens": NEW}
# What files hold beside ``LENGTH``, or in its place where they have a length.
HONOURED = {
    "nothing": {},
    "max_length": {"max_length": 9},
    "max_new_tokens before max_length": {"max_length": 30, "max_new_tokens": 5},
    "min_length": {"min_length": 12},
    "min_new_tokens": {"min_new_tokens": 6},
    "a length with a fraction of 0": {"max_new_tokens": 8.0},
    "min_new_tokens before min_length": {"min_length": 3, "min_new_tokens": 9},
    "both lengths": {"min_length": 7, "max_length": 8},
    "n-grams": {"no_repeat_ngram_size": 2},
    "n-grams of one token": {"no_repeat_ngram_size": 1},
    "n-grams of three": {"no_repeat_ngram_size": 3},
    "penalty": {"repetition_penalty": 1.5},
    "large penalty": {"repetition_penalty": 8.0},
    "bonus": {"repetition_penalty": 0.7},
    # Ids that no token has change nothing.
    "suppressed": {"suppress_tokens": [-1, *range(10, 90, 2), 160]},
    "suppressed first": {"begin_suppress_tokens": [*range(3, 100), 999]},
    "forced first": {"forced_bos_token_id": 17},
    "forced last": {"forced_eos_token_id": 1},
    "one of several forced last": {"forced_eos_token_id": [1, 7]},
    "forced first and suppressed": {
        "forced_bos_token_id": 17, "begin_suppress_tokens": list(range(3, 100)),
    },
    "bad words": {"bad_words_ids": [[n] for n in range(20, 70)]},
    "bad words of several tokens": {"bad_words_ids": [[157, 155], [121, 42, 70], [17, 1]]},
    "a bad word that ends": {"bad_words_ids": [[1], [4]]},
    "biases": {"sequence_bias": [[[5], 4.0], [[9, 5], -8.0], [[5, 5], -9.0], [[9], -1e10]]},
    "several ends": {"eos_token_id": [1, 42, 70]},
    "several ends and a length": {"eos_token_id": [1, 155, 42], "min_length": 8},
    "one beam": {"num_beams": 1, "length_penalty": 2.0, "early_stopping": True},
    "sampling settings without sampling": {"do_sample": False, "temperature": 0.3, "top_k": 5},
    "settings of caches and outputs": {
        "use_cache": True, "output_scores": False, "num_return_sequences": 1,
        "transformers_version": "5.0", "return_dict_in_generate": False,
    },
    "neutral values": {
        "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "guidance_scale": 1.0,
        "min_length": 0,
        "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
        "diversity_penalty": 0.0, "num_beam_groups": 1, "renormalize_logits": False,
    },
    "null": {"suppress_tokens": None, "forced_bos_token_id": None, "max_length": None},
    "everything": {
        "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "min_length": 10,
        "forced_eos_token_id": 1, "suppress_tokens": [11, 12, 13], "bad_words_ids": [[5], [6, 7]],
        "begin_suppress_tokens": [22], "sequence_bias": [[[40], 1.5]],
    },
}  # fmt: skip
# Settings that a warning names, by themselves or as it says.
LEFT_OUT = [
    {"guidance_scale": 1.5},
    {"encoder_repetition_penalty": 2.0},
    {"encoder_no_repeat_ngram_size": 2},
    {"exponential_decay_length_penalty": [3, 1.5]},
    {"watermarking_config": {"bias": 2.0}},
    {"renormalize_logits": True},
    {"max_time": 2.5},
    {"is_assistant": True, "force_bos_token_to_be_generated": True},
    {"diversity_penalty": 1.0, "num_beam_groups": 2},
]
WITH_REMEDY = [
    ({"num_beams": 4}, "num_beams 4 (--beams 4)"),
    ({"num_return_sequences": 2, "num_beams": 2}, "num_return_sequences 2 (--num_decodes 2)"),
    ({"stop_strings": [";"]}, "stop_strings [';'] (--stop TEXT)"),
    ({"do_sample": True}, "do_sample True (--temperature 1.0), top_k 50 (--top_k 50)"),
    (
        {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "typical_p": 0.8},
        "do_sample True (--temperature 0.7), top_p 0.9 (--top_p 0.9), typical_p 0.8",
    ),
]
# Settings, options, and what is named of the settings.
SAMPLED = {"temperature": 0.5}
NAMED = [
    ({"do_sample": True}, SAMPLED, "top_k 50 (--top_k 50)"),
    ({"do_sample": True, "top_k": 3}, SAMPLED, "top_k 3 (--top_k 3)"),
    ({"do_sample": True, "top_k": 3}, SAMPLED | {"top_k": 4}, None),
    ({"do_sample": True, "top_k": 0, "top_p": 0.9}, SAMPLED, "top_p 0.9 (--top_p 0.9)"),
    ({"do_sample": True, "top_k": 0, "min_p": 0.0, "top_p": 1.0}, SAMPLED, None),
    # The options have one of both.
    ({"do_sample": True, "top_p": 0.9}, SAMPLED, "top_p 0.9 (--top_p 0.9), top_k 50"),
    ({"do_sample": True, "top_p": 0.9}, SAMPLED | {"top_p": 0.8}, "top_k 50"),
    ({"do_sample": True, "top_p": 0.9}, SAMPLED | {"top_k": 50}, "top_p 0.9"),
    # Here it keeps all tokens, and there one.
    ({"do_sample": True, "top_k": 0, "top_p": 0.0}, SAMPLED, "top_p 0.0"),
    # Without do_sample, settings of sampling change sampled texts.
    ({"top_p": 0.9, "min_p": 0.1, "temperature": 0.3}, {}, None),
    ({"top_p": 0.9, "min_p": 0.1}, SAMPLED, "top_p 0.9 (--top_p 0.9), min_p 0.1"),
    ({"do_sample": False, "top_k": 7, "top_p": 1.0}, SAMPLED, "top_k 7 (--top_k 7)"),
    # A search samples nothing here.
    (
        {"num_beams": 4, "do_sample": True, "top_k": 9},
        {},
        "num_beams 4 (--beams 4), do_sample True, top_k 9",
    ),
    ({"num_beams": 4, "do_sample": True, "top_k": 9}, {"beams": 4}, "do_sample True, top_k 9"),
    ({"num_beams": 4, "stop_strings": "x"}, {}, "num_beams 4 (--beams 4), stop_strings 'x'"),
    ({"num_beams": 4}, SAMPLED, "num_beams 4"),
    # Several texts need beams or a temperature.
    ({"num_return_sequences": 3}, {}, "num_return_sequences 3"),
    ({"num_return_sequences": 3}, {"beams": 2}, "num_return_sequences 3"),
    ({"num_return_sequences": 3}, {"beams": 3}, "num_return_sequences 3 (--num_decodes 3)"),
    (
        {"num_return_sequences": 3, "do_sample": True, "top_k": 0},
        {},
        "do_sample True (--temperature 1.0), num_return_sequences 3 (--num_decodes 3)",
    ),
    ({"guidance_scale": 0.0}, {}, "guidance_scale 0.0"),
    ({"force_words_ids": [], "diversity_penalty": 0}, {}, None),
]
# Settings of a task, as T5's own for summaries.
SUMMARIES = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "max_length": 12,
    "min_length": 5,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "prefix": "summarize: ",
}


def whole(name):
    """Settings with a length of the text."""
    settings = HONOURED[name]
    return settings if "max_length" in settings else LENGTH | settings


def make(directory, spiece, layers, seed, kind="t5", **changes):
    """Saves a random T5 of transformers whose texts vary, and returns its directory."""
    torch.manual_seed(seed)
    sizes = SIZES | {"vocab_size": 160, "num_layers": layers, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model(
        kind, feed_forward_proj="gated-gelu", **sizes | changes
    )
    model = enlivened(transformers.AutoModelForSeq2SeqLM.from_config(config))
    # So that texts end.
    model.shared.weight.data[config.eos_token_id] *= 1.5
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def pair(tmp_path_factory, spiece):
    """Provides the directories of a target and of a draft."""
    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        add_vocabulary(make(folder / name, spiece, layers, seed=1), spiece)
    return folder


@pytest.fixture
def with_settings(pair, tmp_path):
    """Provides ``with_settings(settings, old)``: the target with these in one of its files."""

    def write(settings, old=False, tasks=None):
        directory = tmp_path / "theirs"
        shutil.copytree(pair / "target", directory)
        path, config = directory / GENERATION_NAME, directory / "config.json"
        values = json.loads(config.read_text())
        if tasks is not None:
            values["task_specific_params"] = tasks
        if old:
            path.unlink()
            values |= settings
        else:
            given = json.loads(path.read_text()) | settings
            path.write_text(json.dumps(given))
        config.write_text(json.dumps(values))
        return directory

    return write


def of_transformers(directory, ids, **options):
    """Returns the ids that ``generate`` appends to the start token, without what follows an end."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    ends = model.generation_config.eos_token_id
    rows = []
    for row in ids:
        # One by one: a search lasts as long as its batch.
        (found,) = model.generate(input_ids=torch.tensor([row]), **options)
        found = found.tolist()[1:]
        stops = [n for n, token in enumerate(found) if token in np.atleast_1d(ends)]
        rows.append(found[: stops[0] + 1] if stops else found)
    return rows


def left_out(caplog):
    return [r.getMessage() for r in caplog.records if "not applied" in r.getMessage()]


def ours(directory, draft, texts=SENTENCES, **options):
    """Returns the ids of the generator's outputs and of its sources."""
    generator = Generator.load(directory, draft)
    sources = [generator.vocabulary.framed(generator.vocabulary.encode(text)) for text in texts]
    options = {"gamma": 3, "batch_size": len(texts)} | options
    answers = generator.generate(texts, **options)
    return [answer[0].output_ids for answer in answers], sources


OLD = ("max_length", "n-grams", "suppressed", "several ends", "null", "everything")


@pytest.mark.parametrize(
    ("name", "old"), [*((name, False) for name in HONOURED), *((name, True) for name in OLD)]
)
def test_text_is_that_of_generate(with_settings, pair, caplog, name, old):
    """Decodes with a draft; ``old`` is in config.json."""
    directory = with_settings(whole(name), old)
    # By themselves transformers' texts have 20 tokens.
    options = {"max_decode_len": 20} if name == "null" else {}
    found, sources = ours(directory, pair / "draft", **options)
    assert found == of_transformers(directory, sources)
    assert left_out(caplog) == []


@pytest.mark.parametrize(
    "options", [{"gamma": 0}, {"batch_size": 2}, {"verifier": "tree"}], ids=str
)
def test_in_every_loop(with_settings, pair, options):
    directory = with_settings(whole("everything"))
    found, sources = ours(directory, pair / "draft", **options)
    assert found == of_transformers(directory, sources)


@pytest.fixture(scope="module")
def without_settings(pair):
    """Provides ids of the sources, and what transformers appends to them without settings."""
    vocabulary = load_vocabulary(pair / "target")
    sources = [vocabulary.framed(vocabulary.encode(text)) for text in SENTENCES]
    return sources, of_transformers(pair / "target", sources, **LENGTH)


@pytest.mark.parametrize("settings", [s for s in HONOURED if s not in (
    "nothing", "one beam", "neutral values", "null", "a bad word that ends",
    "sampling settings without sampling", "settings of caches and outputs",
)])  # fmt: skip
def test_every_setting_changes_the_text(with_settings, without_settings, settings):
    """Otherwise the test above would say nothing of it."""
    sources, unchanged = without_settings
    assert of_transformers(with_settings(whole(settings)), sources) != unchanged


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *((each, ", ".join(f"{n} {v!r}" for n, v in each.items())) for each in LEFT_OUT),
        *WITH_REMEDY,
    ],
)
def test_what_is_not_honoured_is_named(with_settings, caplog, settings, named):
    directory = with_settings(LENGTH | settings, old="beams" in named)
    generator = Generator.load(directory)
    assert left_out(caplog) == []
    beams = 2 if "renormalize_logits" in settings else 0
    for _ in range(2):
        generator.generate("The cat.", beams=beams)[0]
    (line,) = left_out(caplog)
    assert line == f"{directory} sets options that are not applied: " + line.partition(": ")[2]
    assert named in line
    assert "\n" not in line


def test_generation_config_comes_alone(with_settings, pair):
    """Beside that file, transformers does not look for settings in config.json."""
    directory = with_settings(LENGTH)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 1}))
    found, sources = ours(directory, pair / "draft")
    assert found == of_transformers(directory, sources)
    assert found == ours(pair / "target", pair / "draft", max_decode_len=NEW)[0]


def test_options_come_before_the_checkpoints(with_settings, pair):
    directory = with_settings(LENGTH | {"no_repeat_ngram_size": 1, "suppress_tokens": [5]})
    given = {"max_decode_len": 9, "no_repeat_ngram_size": 2, "suppress_tokens": ()}
    found, sources = ours(directory, pair / "draft", **given)
    expected = {"max_new_tokens": 9, "no_repeat_ngram_size": 2}
    assert found == of_transformers(pair / "target", sources, **expected)


BEAMS = {
    "of a task": SUMMARIES,
    "nothing": {"num_beams": 3},
    "no early stopping": {"num_beams": 4, "length_penalty": 0.5, "early_stopping": False},
    "never": {"num_beams": 2, "length_penalty": 1.5, "early_stopping": "never"},
    "negative penalty": {"num_beams": 3, "length_penalty": -1.0, "early_stopping": "never"},
    "without a penalty": {"num_beams": 5, "length_penalty": 0.0, "early_stopping": True},
    "rules": {
        "num_beams": 3, "repetition_penalty": 1.4, "forced_bos_token_id": 9,
        "forced_eos_token_id": 1, "suppress_tokens": [20, 21],
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", BEAMS.values(), ids=BEAMS)
@pytest.mark.parametrize("gamma", [0, 3])
def test_a_search_is_that_of_generate(with_settings, pair, settings, gamma):
    settings = {"max_length": 13} | settings
    directory = with_settings({n: v for n, v in settings.items() if n != "prefix"})
    generator = Generator.load(directory, pair / "draft" if gamma else None)
    sources = [generator.vocabulary.framed(generator.vocabulary.encode(t)) for t in SENTENCES]
    options = {"beams": settings["num_beams"], "gamma": gamma}
    found = [answer[0].output_ids for answer in generator.generate(SENTENCES, **options)]
    assert found == of_transformers(directory, sources)


def test_scores_of_a_search_are_those_of_generate(with_settings):
    directory = with_settings({"max_length": 13, "num_beams": 4, "length_penalty": 2.0})
    generator = Generator.load(directory)
    source = generator.vocabulary.framed(generator.vocabulary.encode(SENTENCES[0]))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    theirs = model.generate(
        input_ids=torch.tensor([source]), num_return_sequences=4, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    (answer,) = generator.generate(SENTENCES[0], beams=4, num_decodes=4)
    scores = [output.score for output in answer]
    np.testing.assert_allclose(scores, theirs.sequences_scores, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "options"),
    [({"num_beams": 2}, {"beams": 2}), ({"do_sample": True, "top_k": 0}, {"temperature": 0.5}),
     ({"num_return_sequences": 2, "num_beams": 2}, {"num_decodes": 2, "beams": 3}),
     ({"stop_strings": [";"]}, {"stop": ";"}), ({"renormalize_logits": True}, {})],
    ids=str,
)  # fmt: skip
def test_what_an_option_replaces_is_not_named(with_settings, caplog, settings, options):
    generator = Generator.load(with_settings(LENGTH | settings))
    generator.generate("The cat.", **options)[0]
    assert left_out(caplog) == []
    # It is when the option is left out.
    generator.plain().generate("The cat.", beams=3 if "renormalize_logits" in settings else 0)[0]
    assert len(left_out(caplog)) == 1


@pytest.mark.parametrize(("settings", "options", "named"), NAMED, ids=str)
def test_each_remedy_fits_the_options(caplog, settings, options, named):
    _, left = options_of(settings, "my-model", num_ids=9)
    for _ in range(2):
        left.warn(["The cat."], GenerateOptions(**options))
    expected = [] if named is None else [f"my-model sets options that are not applied: {named}"]
    assert left_out(caplog) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"length_penalty": 0.0}, (0.0, False)),
        ({"early_stopping": "never"}, (1.0, "never")),
        ({"num_beams": 3}, (1.0, False)),
        ({"num_beams": 1}, ()),
    ],
    ids=str,
)
def test_a_ranking_is_that_of_transformers_if_the_checkpoint_sets_a_part(settings, expected):
    options, _ = options_of(settings, "my-model", num_ids=9)
    assert tuple(options.values()) == expected


def test_settings_of_a_task(with_settings, pair, caplog):
    directory = with_settings(LENGTH, tasks={"summarization": SUMMARIES, "translation": {}})
    Generator.load(directory).generate("The cat.")[0]
    assert "settings of the tasks summarization, translation (--task NAME)" in left_out(caplog)[0]
    caplog.clear()
    generator = Generator.load(directory, task="summarization")
    generator.generate("summarize: The cat.", beams=4)[0]
    assert left_out(caplog) == []
    list(generator.generate(["summarize: The cat.", "The cat."], batch_size=2))
    (line,) = left_out(caplog)
    assert "num_beams 4 (--beams 4), prefix 'summarize: ' (put it before each input)" in line
    sources = [generator.vocabulary.framed(generator.vocabulary.encode(t)) for t in SENTENCES]
    found = [answer[0].output_ids for answer in generator.generate(SENTENCES, beams=4)]
    theirs = {n: v for n, v in SUMMARIES.items() if n != "prefix"} | {"max_new_tokens": None}
    assert found == of_transformers(directory, sources, **theirs | LENGTH)


def test_a_task_that_is_not_there(with_settings):
    with pytest.raises(InputError, match="has no settings of a task 'x': it has a, b; leave"):
        Generator.load(with_settings({}, tasks={"a": {}, "b": {}}), task="x")


@pytest.mark.parametrize(
    "settings",
    [{"no_repeat_ngram_size": "3"}, {"no_repeat_ngram_size": 2.5}, {"repetition_penalty": True},
     {"suppress_tokens": "x"}, {"bad_words_ids": [3]}, {"max_new_tokens": 0},
     {"bad_words_ids": [[160]]}, {"early_stopping": "always"},
     {"max_length": 10**30}, {"repetition_penalty": 10**400},
     {"sequence_bias": [[[5], 10**400]]}, {"sequence_bias": [[[5], float("nan")]]},
     {"sequence_bias": [[[5], float("inf")]]}, {"sequence_bias": [[[5], "2"]]},
     {"sequence_bias": [[[5]]]}, {"sequence_bias": 3}, {"repetition_penalty": 1e-38},
     {"task_specific_params": "x"}],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be(with_settings, settings):
    (name,) = settings
    directory = with_settings(settings)
    with pytest.raises(InputError, match=name.replace("max_new_tokens", "max_length")):
        next(Generator.load(directory).generate("The cat."))[0]


@pytest.mark.parametrize("to", ["huggingface", "native", "t5x"])
def test_a_converted_model_has_the_settings(with_settings, pair, tmp_path, to):
    settings = LENGTH | {"no_repeat_ngram_size": 2, "num_beams": 4, "made_up": [1]}
    directory = with_settings(settings, tasks={"summarization": SUMMARIES})
    converted = tmp_path / "checkpoint_0"
    convert(directory, converted, to=to)
    assert ours(converted, pair / "draft")[0] == ours(directory, pair / "draft")[0]
    of_task = (Generator.load(each, task="summarization") for each in (directory, converted))
    assert len({str(generator.defaults) for generator in of_task}) == 1
    back = converted if to == "huggingface" else tmp_path / "back"
    if back != converted:
        convert(converted, back, to="huggingface")
    written = json.loads((back / GENERATION_NAME).read_text())
    assert {name: written[name] for name in settings} == settings
    config = json.loads((back / "config.json").read_text())
    assert config["task_specific_params"] == {"summarization": SUMMARIES}


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory):
    """Targets of families with other special ids, whose tokens have other numbers here."""
    folder = tmp_path_factory.mktemp("renumbered")
    for family, (kind, start, eos, pad) in FAMILIES.items():
        ids = {"decoder_start_token_id": start, "eos_token_id": eos, "pad_token_id": pad}
        for name, layers in (("target", 2), ("draft", 1)):
            directory = folder / family / name
            make(directory, None, layers, 3, kind, **ids | {"vocab_size": NUM_IDS})
            tokenizer_of(start, eos, pad).save(str(directory / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{"no_repeat_ngram_size": 2, "repetition_penalty": 1.6},
     {"suppress_tokens": [9, 11, 30, NUM_IDS], "forced_bos_token_id": 8,
      "bad_words_ids": [[12, 12], [13]], "min_length": 9}],
    ids=str,
)  # fmt: skip
def test_ids_are_the_tokenizers(renumbered, tmp_path, family, settings):
    directory = tmp_path / "theirs"
    shutil.copytree(renumbered / family / "target", directory)
    path = directory / GENERATION_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | LENGTH | settings))
    generator = Generator.load(directory, renumbered / family / "draft")
    vocabulary = generator.vocabulary
    sources = [vocabulary.to_theirs(vocabulary.framed(vocabulary.encode(t))) for t in TEXTS]
    found = [answer[0].output_ids for answer in generator.generate(TEXTS, gamma=3, batch_size=2)]
    assert [vocabulary.to_theirs(row) for row in found] == of_transformers(directory, sources)


def test_several_forced_last_are_refused_if_another_comes_first_here(renumbered, tmp_path):
    """transformers takes the lowest of its ids, and here the end's is lower than the others'."""
    directory = tmp_path / "theirs"
    shutil.copytree(renumbered / "nort5" / "target", directory)
    path = directory / GENERATION_NAME
    values = json.loads(path.read_text()) | LENGTH
    path.write_text(json.dumps(values | {"forced_eos_token_id": [9, 6]}))
    Generator.load(directory)
    path.write_text(json.dumps(values | {"forced_eos_token_id": [6, 2]}))
    with pytest.raises(InputError, match=r"\[6, 2\], whose order changes here: give one id"):
        Generator.load(directory)


def test_a_prefix_of_every_output(pair, caplog):
    """The prefix is transformers' ``decoder_input_ids``."""
    caplog.set_level(logging.WARNING)
    options = {"output_prefix": "the", "max_decode_len": 9, "no_repeat_ngram_size": 2}
    options |= {"min_decode_len": 4, "begin_suppress_tokens": tuple(range(3, 60))}
    found, sources = ours(pair / "target", pair / "draft", **options)
    generator = Generator.load(pair / "target", pair / "draft")
    prefix = generator.vocabulary.encode("the")
    assert prefix
    theirs = of_transformers(
        pair / "target", sources, decoder_input_ids=torch.tensor([[0, *prefix]]), max_new_tokens=9,
        no_repeat_ngram_size=2, min_new_tokens=4, begin_suppress_tokens=list(range(3, 60)),
    )  # fmt: skip
    assert found == theirs
    (first, *_) = generator.generate(SENTENCES[0], gamma=3, **options)
    assert first[0].output.startswith("the")
    *_, last = generator.stream(SENTENCES[0], gamma=3, **options)
    assert last.text == first[0].output
