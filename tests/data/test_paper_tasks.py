"""The paper's tasks: names, texts, ids and metrics, without a download."""

import pytest

from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.metrics import METRICS
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece

seqio = pytest.importorskip("seqio")
import tensorflow as tf  # noqa: E402

from spec_t5x.data import paper_tasks  # noqa: E402
from spec_t5x.data.paper_tasks import (  # noqa: E402
    CNN_DAILYMAIL,
    WMT_ENDE,
    register_paper_tasks,
)
from spec_t5x.labs.task_scores import read_task  # noqa: E402

# As TFDS has them.
SOURCES = {
    WMT_ENDE: {
        "en": ["The cat sleeps.", "We go home."],
        "de": ["Die Katze schläft.", "Wir gehen nach Hause."],
    },
    CNN_DAILYMAIL: {
        "article": ["A long story . It ends .", "Another one ."],
        "highlights": ["Story .\nEnds .", "One more ."],
        "id": ["1", "2"],
    },
}
INPUTS = {
    WMT_ENDE: [f"translate English to German: {text}" for text in SOURCES[WMT_ENDE]["en"]],
    CNN_DAILYMAIL: [f"summarize: {text}" for text in SOURCES[CNN_DAILYMAIL]["article"]],
}
TARGETS = {WMT_ENDE: SOURCES[WMT_ENDE]["de"], CNN_DAILYMAIL: SOURCES[CNN_DAILYMAIL]["highlights"]}
# TFDS's name, our metric and its figures.
EXPECTED = {
    WMT_ENDE: ("wmt_t2t_translate/de-en:1.0.0", "bleu_intl", {"bleu"}),
    CNN_DAILYMAIL: ("cnn_dailymail:3.4.0", "rouge", {"rouge1", "rouge2", "rougeLsum"}),
}
BYTES = ByteVocabulary()


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    texts = [text for values in (*INPUTS.values(), *TARGETS.values()) for text in values]
    return train_sentencepiece(texts * 3, tmp_path_factory.mktemp("vocabulary") / "spiece", 50)


@pytest.fixture
def local_tasks(spiece, monkeypatch):
    """Replaces the tasks' vocabulary by a local one, and TFDS by two examples."""
    register_paper_tasks(str(spiece), extra_ids=100)
    for name, columns in SOURCES.items():

        def dataset_fn(split, shuffle_files, seed=None, columns=columns):
            return tf.data.Dataset.from_tensor_slices(
                {"train": columns, "validation": columns}[split]
            )

        source = seqio.FunctionDataSource(dataset_fn, splits=("train", "validation"))
        monkeypatch.setattr(seqio.TaskRegistry.get(name), "_source", source)
    yield
    register_paper_tasks()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_task_is_registered_as_the_t5_library_does(name):
    task, (tfds_name, metric, _) = seqio.TaskRegistry.get(name), EXPECTED[name]
    assert task.source.tfds_dataset.name == tfds_name
    assert set(task.output_features) == {"inputs", "targets"}
    for feature in task.output_features.values():
        # By this very name T5X knows that task and model agree.
        assert feature.vocabulary == seqio.SentencePieceVocabulary(paper_tasks.VOCABULARY_PATH)
        assert feature.add_eos
    assert not task.output_features["inputs"].required
    assert task.metric_fns == [METRICS[metric]]


def test_registering_again_is_no_mistake_and_leaves_others_tasks_alone(monkeypatch):
    assert register_paper_tasks() == [WMT_ENDE, CNN_DAILYMAIL]
    task = seqio.TaskRegistry.get(WMT_ENDE)
    # As if the t5 library had been there first.
    monkeypatch.setattr(paper_tasks, "_ours", {CNN_DAILYMAIL})
    assert register_paper_tasks() == [CNN_DAILYMAIL]
    assert seqio.TaskRegistry.get(WMT_ENDE) is task


@pytest.mark.parametrize("name", EXPECTED)
def test_a_task_is_read_with_the_models_vocabulary_and_scored_with_its_metric(
    local_tasks, spiece, name
):
    # Byte ids too, although the task's own vocabulary is another.
    for vocabulary in (SentencePieceVocabulary(spiece, extra_ids=100), BYTES):
        (read,) = read_task(name, "validation", vocabulary, lengths={"inputs": 64, "targets": 8})
        assert read.name == name
        texts, examples = zip(*read.pairs, strict=True)
        assert list(texts) == INPUTS[name]
        assert [example.target for example in examples] == TARGETS[name]
        for text, example in read.pairs:
            ids = [example.features[side].tolist() for side in ("inputs", "targets")]
            source, target = map(vocabulary.encode, (text, example.target))
            assert ids == [[*source[:63], 1], [*target[:7], 1]]
    perfect, worse = (read.metric(examples, TARGETS[name][::step]) for step in (1, -1))
    assert perfect == pytest.approx(dict.fromkeys(EXPECTED[name][2], 100.0))
    assert all(worse[key] < perfect[key] for key in perfect)
    (one,) = read_task(name, "validation", BYTES, limit=1)
    assert len(one.pairs) == 1


def test_postprocessors_mixtures_and_scores_of_seqios_kind(local_tasks):
    """Both sides pass the postprocessor, with their example; a mixture is its tasks."""

    def postprocess(text, example, is_target):
        assert example["inputs_pretokenized"].decode() in INPUTS[WMT_ENDE]
        return (text.upper(), is_target)

    def count(targets, predictions):
        assert all(is_target for _, is_target in targets)
        assert not any(is_target for _, is_target in predictions)
        same = sum(t[0] == p[0] for t, p in zip(targets, predictions, strict=True))
        return {"same": seqio.metrics.Scalar(same), "note": seqio.metrics.Text("x")}

    def likelihood(targets, scores):
        raise AssertionError("it is of log-likelihoods")

    task = seqio.TaskRegistry.get(WMT_ENDE).replace(
        name="paper_shouting", postprocess_fn=postprocess, metric_fns=[count, likelihood]
    )
    seqio.TaskRegistry.add_provider("paper_shouting", task)
    seqio.MixtureRegistry.add("paper_both", ["paper_shouting", CNN_DAILYMAIL], default_rate=1.0)
    try:
        read = {part.name: part for part in read_task("paper_both", "train", BYTES)}
        assert set(read) == {"paper_shouting", CNN_DAILYMAIL}
        part = read["paper_shouting"]
        texts = [TARGETS[WMT_ENDE][0].lower(), "x"]
        examples = [example for _, example in part.pairs]
        assert part.metric(examples, texts) == {"same": 1.0}
    finally:
        seqio.TaskRegistry.remove("paper_shouting")
        seqio.MixtureRegistry.remove("paper_both")


@pytest.mark.parametrize(
    ("name", "split", "modules", "message"),
    [
        ("wmt_t2t_ende_v03", "validation", [], "no task or mixture .*wmt_t2t_ende_v003"),
        (WMT_ENDE, "absent", [], "cannot read split 'absent' of task wmt_t2t_ende_v003"),
        (WMT_ENDE, "train", ["my_tasks"], r"task module my_tasks \(a part is missing\)"),
    ],
)
def test_tasks_that_cannot_be_read(
    local_tasks, tmp_path, monkeypatch, name, split, modules, message
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_tasks.py").write_text("raise ImportError('a part is missing')\n")
    with pytest.raises(InputError, match=message):
        read_task(name, split, BYTES, modules=modules)
