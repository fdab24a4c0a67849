"""Streams of batches from seqio tasks and mixtures."""

import itertools

import numpy as np
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError

seqio = pytest.importorskip("seqio")
import tensorflow as tf  # noqa: E402

from spec_t5x.labs.training.run_checkpoints import RunCheckpoints  # noqa: E402
from spec_t5x.labs.training.task_streams import PairedTask, TaskStream  # noqa: E402

LENGTHS = {"inputs": 16, "targets": 8}
BUCKETS = (4, 8, 16, 32)
# Sources of 0 to 19 letters; the first letters of a source and a target tell their task.
PAIRS = {
    "stream_a": [("x" * (i % 20), "a" * (i % 7 + 1)) for i in range(50)],
    "stream_b": [("y" * (i % 11 + 1), "b" * (i % 13 + 1)) for i in range(30)],
}
MIXTURE, GENERATED, SOURCELESS, EMPTY = "stream_ab", "stream_json", "stream_lm", "stream_empty"


@pytest.fixture(scope="module", autouse=True)
def tasks():
    def add(name, dataset, features=("inputs", "targets")):
        feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
        seqio.TaskRegistry.add(
            name,
            seqio.FunctionDataSource(
                lambda split, shuffle_files, seed=None: dataset(), splits=("train", "validation")
            ),
            preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
            output_features=dict.fromkeys(features, feature),
        )

    def sliced(pairs):
        columns = dict(zip(("inputs", "targets"), map(list, zip(*pairs, strict=True)), strict=True))
        return lambda: tf.data.Dataset.from_tensor_slices(columns)

    def generated():
        examples = [{"inputs": a, "targets": b} for a, b in PAIRS["stream_b"]]
        signature = dict.fromkeys(("inputs", "targets"), tf.TensorSpec((), tf.string))
        return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)

    for name, pairs in PAIRS.items():
        add(name, sliced(pairs))
    add(GENERATED, generated)
    add(SOURCELESS, sliced(PAIRS["stream_b"]), features=("targets",))
    add(EMPTY, lambda: sliced([("a", "b")])().take(0))
    seqio.MixtureRegistry.add(MIXTURE, [("stream_a", 3.0), ("stream_b", 1.0)])
    yield
    seqio.MixtureRegistry.remove(MIXTURE)
    for name in (*PAIRS, GENERATED, SOURCELESS, EMPTY):
        seqio.TaskRegistry.remove(name)


def paired(name, **changes):
    return PairedTask(name, ByteVocabulary(), **{"lengths": LENGTHS, **changes})


def stream(name=MIXTURE, seed=0, **changes):
    options = {"split": "train", "buckets": BUCKETS, "tokens_per_batch": 32, **changes}
    return TaskStream(paired(name), seed=seed, **options)


def arrays(batches, number):
    return [
        (b.encoder_input_tokens.tolist(), b.decoder_target_tokens.tolist())
        for b in itertools.islice(batches, number)
    ]


def test_batches_are_full_and_have_the_shape_of_their_bucket():
    seen = set()
    for batch in itertools.islice(stream().batches(), 30):
        source, target = batch.encoder_input_tokens, batch.decoder_target_tokens
        lengths = np.maximum(np.count_nonzero(source, 1), np.count_nonzero(target, 1))
        bucket = min(length for length in BUCKETS if length >= lengths.max())
        rows = 32 // bucket
        assert source.shape == (rows, min(bucket, 16)) and target.shape == (rows, min(bucket, 8))
        assert batch.num_pairs == rows
        # No pair would fit a smaller bucket, and none is empty.
        smaller = [length for length in BUCKETS if length < bucket]
        assert (lengths > max(smaller, default=0)).all()
        assert (batch.decoder_input_tokens[:, 1:] == target[:, :-1]).all()
        assert not batch.decoder_input_tokens[:, 0].any()
        seen.add(bucket)
    assert seen == {4, 8, 16}


def test_a_mixture_is_mixed_as_seqio_mixes():
    theirs = seqio.get_mixture_or_task(MIXTURE).get_dataset(
        LENGTHS, "train", shuffle=True, seed=5, num_epochs=None
    )
    ours = paired(MIXTURE).dataset("train", seed=5, num_epochs=None)
    for a, b in zip(theirs.take(100), ours.take(100), strict=True):
        for side in LENGTHS:
            assert (a[side].numpy() == b[side].numpy()).all()


def test_a_position_that_finds_no_room(tmp_path, disk):
    reading = stream()
    next(reading.batches())
    state = {"array": np.zeros(3)}
    with RunCheckpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state, {}, reading.save_position)
        checkpoints.finish()
        disk.fill()
        with pytest.raises(OSError, match="File too large$"):
            reading.save_position(tmp_path / "position")
        with pytest.raises(InputError, match="too large; the latest checkpoint is of step 1: free"):
            checkpoints.save(2, state, {}, reading.save_position)
        disk.clear()
        assert checkpoints.latest_step == 1


@pytest.mark.parametrize("name", [MIXTURE, GENERATED])
def test_a_stream_continues_from_its_position(name, tmp_path):
    undisturbed = arrays(stream(name).batches(), 10)
    interrupted = stream(name)
    batches = interrupted.batches()
    assert arrays(batches, 4) == undisturbed[:4]
    interrupted.save_position(tmp_path)
    assert (tmp_path / "iterator.index").is_file() == (name != GENERATED)
    # Saving moves nothing; the position leads to where it was saved.
    assert arrays(batches, 6) == undisturbed[4:]
    resumed = stream(name)
    assert arrays(resumed.batches(4, tmp_path), 2) == undisturbed[4:6]
    # And a position after a resumption.
    resumed.save_position(tmp_path / "later")
    assert arrays(stream(name).batches(6, tmp_path / "later"), 4) == undisturbed[6:]
    # Without a position the batches before are read again.
    assert arrays(stream(name).batches(5), 3) == undisturbed[5:8]


def test_a_position_of_other_data_is_refused(tmp_path):
    begun = stream()
    begun.batches()
    begun.save_position(tmp_path)
    with pytest.raises(InputError, match="was started with seed 0, not 1"):
        stream(seed=1).batches(0, tmp_path)
    with pytest.raises(InputError, match="with batches 0, not 3"):
        begun.batches(3, tmp_path)


def test_pairs_of_a_split_in_order_and_of_each_task_of_a_mixture():
    pairs = paired("stream_b").pairs("validation")
    assert len(pairs) == 30 and pairs.num_dropped == 0
    assert pairs.source.lengths.tolist() == [i % 11 + 2 for i in range(30)]
    assert pairs.target.lengths.tolist() == [min(i % 13 + 2, 8) for i in range(30)]
    assert len(paired(MIXTURE).pairs("validation", limit=4)) == 8
    assert len(paired(MIXTURE).pairs("validation")) == 80


def test_the_first_pairs_of_a_shuffled_epoch():
    ten, again, other = (
        paired(MIXTURE).shuffled_pairs("train", seed, limit=10).target for seed in (0, 0, 1)
    )
    assert len(ten.ends) == 10 and ten.ids.tolist() == again.ids.tolist() != other.ids.tolist()
    # None is the whole epoch.
    assert len(paired("stream_a").shuffled_pairs("train", 0)) == 50


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paired("stream_c"), r"no task or mixture 'stream_c'.*stream_"),
        (lambda: paired("stream_a", modules=["absent_module"]), "task module absent_module"),
        (lambda: paired(SOURCELESS), "task stream_lm has no feature inputs: give a task of"),
        (lambda: stream(split="dev"), "stream_ab has no split 'dev': give one of train, valid"),
        (lambda: paired(EMPTY).pairs("validation"), "'validation' of stream_empty holds no pair"),
        (lambda: stream(EMPTY), "'train' of stream_empty holds no pair of texts"),
        (lambda: stream(tokens_per_batch=0), "tokens_per_batch is 0"),
    ],
)
def test_mistakes_are_reported_before_a_batch_is_read(make, message):
    with pytest.raises(InputError, match=message):
        make()
