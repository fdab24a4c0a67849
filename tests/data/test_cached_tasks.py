"""Tasks that seqio has cached: read on request, refused where the ids are others'."""

import itertools
import json

import numpy as np
import pytest

from spec_t5x.data.task_options import WMT_ENDE, TaskOptions
from spec_t5x.data.vocabulary import ByteVocabulary, SentencePieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.inference.infer_options import InferOptions
from spec_t5x.labs.benchmark.options import TextSource
from spec_t5x.labs.training.run_data import TaskDataOptions
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece
from tests.conftest import ENGLISH, GERMAN

seqio = pytest.importorskip("seqio")
import tensorflow as tf  # noqa: E402

from spec_t5x.data.task_examples import task_or_mixture  # noqa: E402
from spec_t5x.inference.task_source import TaskSource  # noqa: E402
from spec_t5x.labs.metrics import bleu_metric  # noqa: E402
from spec_t5x.labs.task_scores import read_task  # noqa: E402
from spec_t5x.labs.training.task_streams import PairedTask  # noqa: E402

BYTES = ByteVocabulary()
# The texts of the data, and those of the cache.
SIDES = ("inputs", "targets")
FRESH, CACHED = ("fresh", "frisch"), ("cached", "aus dem Lager")
LENGTHS = {"inputs": 32, "targets": 32}
_numbers = itertools.count()


def register(required: bool, vocabulary=None, caching: bool = True) -> str:
    """Registers a task of one example and returns its name."""
    name, text = f"cached_task_{next(_numbers)}", tf.TensorSpec((), tf.string)
    placeholder = [seqio.CacheDatasetPlaceholder(required=required)] if caching else []

    def dataset(split, shuffle_files, seed=None):
        examples = [dict(zip(SIDES, FRESH, strict=True))]
        signature = dict.fromkeys(SIDES, text)
        return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)

    feature = seqio.Feature(vocabulary or seqio.ByteVocabulary(), add_eos=True)
    seqio.TaskRegistry.add(
        name,
        seqio.FunctionDataSource(dataset, splits=("train", "validation")),
        preprocessors=[
            seqio.preprocessors.tokenize,
            *placeholder,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=dict.fromkeys(SIDES, feature),
        metric_fns=[bleu_metric],
    )
    return name


def write_cache(folder, name, vocabulary=BYTES):
    """Writes the files of seqio's caching for a task, here of another text."""
    place = folder / name
    place.mkdir(parents=True)
    features, values = {}, {}
    for key, text in zip(SIDES, CACHED, strict=True):
        ids, encoded = vocabulary.encode(text), [text.encode()]
        values[key] = tf.train.Feature(int64_list=tf.train.Int64List(value=ids))
        kept = tf.train.Feature(bytes_list=tf.train.BytesList(value=encoded))
        values[f"{key}_pretokenized"] = kept
        features[key] = {"shape": [None], "dtype": "int32"}
        features[f"{key}_pretokenized"] = {"shape": [], "dtype": "string"}
    example = tf.train.Example(features=tf.train.Features(feature=values))
    for split in ("train", "validation"):
        with tf.io.TFRecordWriter(f"{place}/{split}.tfrecord-00000-of-00001") as writer:
            writer.write(example.SerializeToString())
        info = {"num_shards": 1, "features": features, "seqio_version": "0.0.20"}
        (place / f"info.{split}.json").write_text(json.dumps(info))
        (place / f"stats.{split}.json").write_text(json.dumps({"examples": 1}))
    (place / "COMPLETED").touch()


@pytest.fixture(autouse=True)
def folders():
    """Leaves seqio the caches of one test alone."""
    seqio.set_global_cache_dirs([])
    yield
    seqio.set_global_cache_dirs([])


def sources(name, caches):
    (read,) = read_task(name, "validation", BYTES, caches=caches)
    return [source for source, _ in read.pairs]


def test_a_task_is_read_from_its_cache_on_request(tmp_path):
    name, uncacheable = register(required=False), register(required=False, caching=False)
    write_cache(tmp_path, name)
    assert sources(name, None) == [FRESH[0]]
    assert sources(name, [str(tmp_path)]) == [CACHED[0]]
    # As in T5X, a task that has no cache is read as it is.
    assert sources(uncacheable, [str(tmp_path)]) == [FRESH[0]]
    # Folders that the program has added to seqio's serve as well.
    assert sources(name, []) == [CACHED[0]]


def test_every_reader_reads_the_cache(tmp_path):
    name, caches = register(required=True), (str(tmp_path),)
    write_cache(tmp_path, name)
    paired = PairedTask(name, BYTES, lengths=LENGTHS, caches=caches)
    expected = [*BYTES.encode(CACHED[0]), 1]
    for found in (paired.pairs("validation"), paired.shuffled_pairs("train", 0)):
        np.testing.assert_array_equal(found.source.ids, expected)
    source = TaskSource(
        tasks=list(seqio.get_subtasks(task_or_mixture(name, BYTES, (), caches))),
        split="validation",
        lengths=None,
        vocabulary=BYTES,
        cached=True,
    )
    (line,) = source.raw()
    assert json.loads(line)["ids"] == expected
    assert source.settings["use_cached_tasks"]


def test_a_mixture_is_read_from_the_caches_of_its_tasks(tmp_path):
    names = [register(required=True), register(required=True)]
    for name in names:
        write_cache(tmp_path, name)
    seqio.MixtureRegistry.add("cached_mixture", names, default_rate=1.0)
    try:
        read = read_task("cached_mixture", "validation", BYTES, caches=[str(tmp_path)])
    finally:
        seqio.MixtureRegistry.remove("cached_mixture")
    assert [str(part.pairs[0][1]) for part in read] == [CACHED[1]] * 2


def test_tasks_that_cannot_be_read(tmp_path):
    name = register(required=True)
    absent = rf"{name} is in no folder of cached tasks \({tmp_path}\): give seqio_additional"
    required = f"{name} requires caching: set use_cached_tasks=True"
    for caches, message in ((None, required), ([str(tmp_path)], absent)):
        with pytest.raises(InputError, match=message):
            sources(name, caches)


def test_a_cache_of_other_ids_is_refused(tmp_path):
    ours, other = (
        SentencePieceVocabulary(train_sentencepiece(text, tmp_path / name, 100))
        for name, text in (("ours", ENGLISH + GERMAN), ("other", GERMAN))
    )

    def read(model):
        spiece = seqio.SentencePieceVocabulary(str(ours.path))
        name = register(required=True, vocabulary=spiece)
        write_cache(tmp_path, name, ours)
        (found,) = read_task(name, "validation", model, caches=[str(tmp_path)])
        return found.pairs[0][0]

    # Sentinels of the model's that the task does not have change no id.
    for model in (ours, SentencePieceVocabulary(ours.path, 100)):
        assert read(model) == CACHED[0]
    for model in (other, BYTES):
        with pytest.raises(InputError, match="which are not the model's: leave use_cached_tasks"):
            read(model)


@pytest.mark.parametrize("given", [("/a", "/b"), ["/a", "/b"]])
@pytest.mark.parametrize(
    ("options", "other"),
    [
        (TextSource, {"mixture_or_task": WMT_ENDE}),
        (InferOptions, {"output_dir": "out", "mixture_or_task": WMT_ENDE}),
        (TaskDataOptions, {"mixture_or_task": WMT_ENDE, "task_feature_lengths": LENGTHS}),
    ],
)
def test_the_options_by_t5xs_names(options, other, given):
    caching = {"use_cached_tasks": True, "seqio_additional_cache_dirs": given}
    assert options(**other, **caching).caches == ("/a", "/b")
    assert options(**other, use_cached_tasks=True).caches == ()
    none = options(**other, use_cached_tasks=True, seqio_additional_cache_dirs=None)
    assert none.caches == ()
    assert options(**other).caches is None
    caching["use_cached_tasks"] = False
    with pytest.raises(InputError, match="/a,/b, which nothing reads: set use_cached_tasks=True"):
        TaskOptions.check_task(options(**other, **caching))
