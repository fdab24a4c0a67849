"""``spec-t5x evaluate`` and ``benchmark`` over seqio tasks and files of all kinds."""

import dataclasses
import itertools
import json
import re

import gin
import pytest

from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.cli.main import main
from spec_t5x.data.task_options import WMT_ENDE
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.evaluation import evaluate
from spec_t5x.labs.benchmark.options import TextSource
from spec_t5x.labs.benchmark.text_source import check_readable, read_sets, read_texts
from spec_t5x.labs.metrics import TextPairs

seqio = pytest.importorskip("seqio")
from spec_t5x.labs.local_tasks import register_jsonl_task, register_tsv_task  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

PAIRS = [
    ("My sister", "Meine Schwester liest"),
    ("a green bird", "Ein grüner Vogel singt"),
    ("The doctor works in a small hospital.", "Der Arzt"),
]
PREFIX = "translate: "
_names = (f"evaluate_test_{i}" for i in itertools.count())


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS), encoding="utf-8")
    return path


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"article": s, "highlights": t}) for s, t in PAIRS]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def spiece(tiny_pair):
    return str(tiny_pair / "target" / "spiece.model")


@pytest.fixture
def task(tsv, spiece):
    name = next(_names)
    yield register_tsv_task(
        name, str(tsv), str(tsv), spiece, prefix=PREFIX, metric="bleu_intl"
    ).name
    seqio.TaskRegistry.remove(name)


@pytest.fixture
def run(tiny_pair, capsys):
    """Provides ``run(*arguments)``: the objects that the command prints."""

    def run_evaluate(*arguments):
        models = ("--target", tiny_pair / "target", "--draft", tiny_pair / "draft")
        # One shape, of all sources.
        common = ("--gamma", 2, "--max_decode_len", 8, "--batch_size", 3)
        words = ("evaluate", *models, *common, *arguments)
        gin.clear_config()
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        assert (status, captured.err) == (0, "")
        return [json.loads(part) for part in re.split(r"(?<=^})\n(?={)", captured.out, flags=re.M)]

    return run_evaluate


def test_a_task_is_the_file_with_its_prefix_and_metric(run, task, tsv):
    (of_task,) = run("--mixture_or_task", task, "--split", "train")
    assert (of_task.pop("task"), of_task.pop("split")) == (task, "train")
    (of_file,) = run("--data", tsv, "--prefix", PREFIX, "--metric", "bleu_intl")
    assert "tok:intl" in of_file.pop("bleu_signature")
    assert of_task == of_file
    assert of_task["num_pairs"] == len(PAIRS)
    assert {"bleu", "alpha"} <= of_task["intervals"].keys()
    (without,) = run("--data", tsv)
    assert without["num_tokens"] != 0 and without["alpha"] != of_task["alpha"]


def test_sources_are_those_that_a_tasks_preprocessors_made(run, task, tsv, spiece, tiny_pair):
    def only_words(dataset):
        return dataset.map(lambda each: each | {"inputs": each["inputs"][:3]})

    name, given = next(_names), seqio.TaskRegistry.get(task)
    preprocessors = [*given.preprocessors, only_words]
    seqio.TaskRegistry.add_provider(name, given.replace(name=name, preprocessors=preprocessors))
    try:
        (of_task,) = run("--mixture_or_task", name)
    finally:
        seqio.TaskRegistry.remove(name)
    generator = Generator.load(tiny_pair / "target", tiny_pair / "draft")
    texts = [generator.vocabulary.encode(PREFIX + source)[:3] for source, _ in PAIRS]
    options = GenerateOptions(gamma=2, max_decode_len=8, batch_size=3)
    outputs = [output for (output,) in generator.generate_ids(texts, options)]
    assert of_task["num_tokens"] == sum(len(output.output_ids) for output in outputs)
    assert of_task["target_calls"] == sum(output.target_calls for output in outputs)


def test_json_lines_and_rouge(run, jsonl, tsv):
    (values,) = run("--data", jsonl, "--metric", "rouge")
    assert {"rouge1", "rouge2", "rougeLsum"} <= set(values)
    assert "bleu_signature" not in values
    (same,) = run("--data", tsv, "--metric", "rouge", "--limit", 3)
    assert values == same


def test_the_first_words_of_each_source(tsv):
    (texts,) = read_sets(TextSource(data=str(tsv), source_words=2), ByteVocabulary())
    assert [source for source, _ in texts.pairs] == ["My sister", "a green", "The doctor"]


def test_a_cached_task_is_asked_for_by_t5xs_names(tiny_pair, task, tmp_path, capsys):
    models = ("--target", tiny_pair / "target", "--draft", "none")
    words = ("evaluate", *models, "--mixture_or_task", task, "--seqio_additional_cache_dirs")
    for more, message in (
        ((), f"{tmp_path}, which nothing reads: give --use_cached_tasks"),
        (("--use_cached_tasks",), f"no folder of cached tasks ({tmp_path}): give --seqio_"),
    ):
        assert main([str(word) for word in (*words, tmp_path, *more)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_each_task_of_a_mixture(run, task, jsonl, spiece):
    other, both = next(_names), next(_names)
    register_jsonl_task(other, str(jsonl), str(jsonl), spiece)
    seqio.MixtureRegistry.add(both, [task, other], default_rate=1.0)
    try:
        first, second = run("--mixture_or_task", both, "--limit", 2)
    finally:
        seqio.MixtureRegistry.remove(both)
        seqio.TaskRegistry.remove(other)
    assert (first["task"], second["task"]) == (task, other)
    assert (first["num_pairs"], second["num_pairs"]) == (2, 2)
    assert "bleu" in first and "rouge1" in second


def test_tasks_of_a_mixture_take_turns(tiny_pair, task, jsonl, spiece):
    other, both = next(_names), next(_names)
    register_jsonl_task(other, str(jsonl), str(jsonl), spiece, prefix="other: ")
    seqio.MixtureRegistry.add(both, [task, other], default_rate=1.0)
    try:
        source = TextSource(mixture_or_task=both)
        texts = read_texts(source, Generator.load(tiny_pair / "target"), GenerateOptions(), 3)
    finally:
        seqio.MixtureRegistry.remove(both)
        seqio.TaskRegistry.remove(other)
    assert [text.partition(": ")[0] for text in texts] == ["translate", "other", "translate"]


def test_generated_tokens_are_those_after_the_prefix(tiny_pair):
    generator = Generator.load(tiny_pair / "target")
    for prefix in ("", "Das ist"):
        options = GenerateOptions(max_decode_len=8, output_prefix=prefix)
        found = evaluate(generator, TextPairs(pairs=PAIRS), options)
        # Plain decoding calls the target once for each.
        assert found.num_tokens == found.target_calls


def test_lengths_of_a_task_cut_as_seqio_does(tiny_pair, task):
    generator = Generator.load(tiny_pair / "target")
    options = TextSource(mixture_or_task=task, task_feature_lengths={"inputs": 12, "targets": 5})
    decoding = options.decoding(GenerateOptions())
    assert (decoding.max_source_len, decoding.max_decode_len, decoding.truncate) == (12, 5, True)
    (texts,) = read_sets(options, generator.vocabulary)
    lengths = []
    for source, example in texts.pairs:
        ids = generator.tokenize(source, decoding)
        assert ids == example.features["inputs"].tolist()
        lengths.append(len(ids))
    assert max(lengths) == 12


def test_a_row_of_table_2_measures_a_task(tiny_pair, task, tmp_path, capsys):
    bindings = [
        f"CHECKPOINT_PATH='{tiny_pair / 'target'}'",
        f"DRAFT_CHECKPOINT_PATH='{tiny_pair / 'draft'}'",
        f"MIXTURE_OR_TASK_NAME='{task}'",
        *("NUM_INPUTS=1", "REPEATS=1", "MAX_DECODE_LEN=8", "TEMPERATURE=0.0", "GAMMA=2"),
    ]
    command = ["benchmark", "--gin_file=gin_configs/experiments/table2.gin"]
    flags = [f"--gin.{binding}" for binding in bindings]
    kept = tmp_path / "figures.json"
    assert main([*command, *flags, "--split", "train", "--json", str(kept)]) == 0
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert "| draft | token | 0 | 1 | 8 | 2 |" in printed
    report = json.loads(kept.read_text())
    assert report["rows"][0]["num_inputs"] == 1 and report["rows"][0]["identical"]
    assert (report["source"]["mixture_or_task"], report["models"]["target"]) == (task, "target")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "x", "mixture_or_task": "y"}, "data is 'x' and mixture_or_task 'y': give one"),
        ({"mixture_or_task": "x", "source_words": 3}, "source_words is 3 and x is a task"),
        ({"mixture_or_task": "x", "prefix": "a"}, "prefix is 'a' and x is a task"),
        ({"data": "x.tsv", "source_field": "a"}, "source_field is 'a' and x.tsv has none"),
        ({"data": "x.jsonl.gz", "num_columns": 2}, "num_columns is 2 and x.jsonl.gz has none"),
        ({"data": "x", "use_cached_tasks": True}, "use_cached_tasks is True and there is no mix"),
        ({"data": "x", "metric": "wer"}, "metric is 'wer': choose one of bleu"),
        (
            {"data": "x", "task_feature_lengths": {"input": 3}},
            "task_feature_lengths is {'input': 3}",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        TextSource(**changes)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("a\tb\nc\n", "", "data.tsv, line 2: 1 columns, not 2"),
        ("", "", "data.tsv"),
        ("a\tb\n", "--source_column 2", "column 2 of 2"),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "benchmark", "acceptance"])
def test_a_file_is_read_before_the_target(command, text, flags, message, tmp_path, capsys):
    data = tmp_path / "data.tsv"
    data.write_text(text)
    words = [command, "--target", "absent-target", "--draft", "copy", "--data", str(data)]
    assert main([*words, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "limit", "message"),
    [
        ("evaluate", "--max_source_len=2", "the encoder takes 2 ('My sister'"),
        ("benchmark", "--gin.GenerateOptions.max_source_len=2", "no input that the target takes"),
        ("acceptance", "--max_source_len=2", "no input that the target takes, all are empty or"),
    ],
)
def test_texts_are_compared_with_the_target_before_it_is_read(
    command, limit, message, tiny_pair, tsv, monkeypatch, capsys
):
    monkeypatch.setattr(StoredModel, "load", lambda *_, **__: pytest.fail("the target was read"))
    words = [command, "--target", str(tiny_pair / "target"), "--draft", "copy", "--data", str(tsv)]
    assert main([*words, limit]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_sources_are_not_scored_against_themselves(tmp_path):
    data = tmp_path / "data.tsv"
    data.write_text("one\ntwo\n")
    source = TextSource(data=str(data))
    with pytest.raises(InputError, match="data.tsv has one column: separate sources and targets"):
        read_sets(source, None)
    # Sources alone suffice to measure speed.
    check_readable(source)
    (texts,) = read_sets(dataclasses.replace(source, target_column=0), ByteVocabulary())
    assert texts.pairs == [("one", "one"), ("two", "two")]


def test_a_task_without_metrics_is_refused_before_the_target_is_loaded(
    tiny_pair, task, monkeypatch, capsys
):
    unscored = seqio.TaskRegistry.get(task).replace(metric_fns=[])
    monkeypatch.setattr(seqio, "get_mixture_or_task", lambda name: unscored)
    monkeypatch.setattr(Generator, "load_named", None)
    words = ["evaluate", "--target", str(tiny_pair / "target"), "--mixture_or_task", task]
    assert main([*words, "--draft", "copy"]) == 2
    assert "has no metric of texts: give another task" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_source_len", 5, "max_source_len is 5 and task_feature_lengths has inputs 12"),
        ("max_decode_len", 5, "max_decode_len is 5 and task_feature_lengths has targets 6"),
        ("max_decode_len", 6, None),
    ],
)
def test_a_limit_beside_another_one_of_the_task_is_refused(name, value, message):
    source = TextSource(mixture_or_task=WMT_ENDE, task_feature_lengths={"inputs": 12, "targets": 6})
    given = GenerateOptions(**{name: value})
    if message is None:
        found = source.decoding(given)
        assert (found.max_source_len, found.max_decode_len, found.truncate) == (12, 6, True)
    else:
        with pytest.raises(InputError, match=message):
            source.decoding(given)
