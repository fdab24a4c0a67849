"""T5's span corruption: lengths, masks, sentinels."""

import doctest
from collections import Counter

import numpy as np
import pytest

from spec_t5x.errors import InputError

seqio = pytest.importorskip("seqio")
import tensorflow as tf  # noqa: E402
from sentencepiece import sentencepiece_model_pb2  # noqa: E402

from spec_t5x.data import span_corruption as subject  # noqa: E402
from spec_t5x.data.span_corruption import (  # noqa: E402
    mark_spans,
    noise_mask,
    span_corruption,
    text_length,
)
from spec_t5x.data.vocabulary import train_sentencepiece  # noqa: E402

FEATURES = {
    name: seqio.Feature(vocabulary=seqio.ByteVocabulary(100)) for name in ("inputs", "targets")
}


def mask(length, seed=0, density=0.15, mean=3.0):
    seeds = tf.constant([[seed, 1], [seed, 2]])
    return noise_mask(tf.constant(length), seeds, density, mean).numpy()


def test_the_lengths_of_t5():
    assert not doctest.testmod(subject).failed
    # ByT5's: spans of 20 bytes (arXiv 2105.13626), targets of 189.
    assert text_length(1024, 0.15, 20.0)[1] == 189


def test_the_module_docstrings_example():
    tokens = tf.range(10, 19)  # Thank you for inviting me to your party last
    noise = tf.constant([0, 0, 1, 1, 0, 0, 0, 0, 1]) > 0
    assert mark_spans(tokens, noise, 100).numpy().tolist() == [10, 11, 99, 14, 15, 16, 17, 98]
    assert mark_spans(tokens, ~noise, 100).numpy().tolist() == [99, 12, 13, 98, 18]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 20, 100, 190, 568])
def test_a_mask_has_the_noise_and_the_spans_that_its_length_says(length):
    # In float32, 190 tokens have 29 of noise.
    noise = max(int(np.round(np.float32(max(length, 2)) * np.float32(0.15))), 1)
    for seed in range(5):
        found = mask(length, seed)
        assert found.shape == (length,) and not found[0]
        if length > 1:
            assert found.sum() == noise
            starts = int(found[0]) + (found[1:] & ~found[:-1]).sum()
            assert starts == max(round(noise / 3.0), 1)


# From 172 on they are filled by texts of 190, 350, 390, 670 and 710 tokens, 15 % of which is
# half a token more than a whole number.
@pytest.mark.parametrize("inputs", [4, 172, 316, 352, 604, 640])
def test_the_lengths_are_those_that_masks_give(inputs):
    length, targets, spans = text_length(inputs, 0.15, 3.0)
    tokens, noise = tf.range(length), mask(length)
    assert (noise[1:] & ~noise[:-1]).sum() == spans
    # EOS is still to come.
    assert len(mark_spans(tokens, tf.constant(noise), 10_000)) == inputs - 1
    assert len(mark_spans(tokens, tf.constant(~noise), 10_000)) == targets - 1


def test_all_masks_are_equally_likely():
    # 4 of 6 tokens are noise, in two spans: 3 cuts of the noise, 1 of the text.
    draws = 900
    counts = Counter(tuple(mask(6, seed, density=0.67, mean=2.0)) for seed in range(draws))
    assert len(counts) == 3
    chi_square = sum((count - draws / 3) ** 2 / (draws / 3) for count in counts.values())
    assert chi_square < 13.8  # 2 degrees of freedom, p = 0.001


def corrupted(texts, lengths, seed=0, features=FEATURES):
    dataset = tf.data.Dataset.from_generator(
        lambda: ({"targets": text} for text in texts),
        output_signature={"targets": tf.TensorSpec([None], tf.int32)},
    )
    with seqio.utils.map_seed_manager(seed):
        return list(span_corruption(dataset, lengths, features).as_numpy_iterator())


def undone(example, sentinels):
    """The text that an example was made of."""
    first = min(sentinels)
    spans, between = [], iter(example["targets"].tolist())
    for token in between:
        spans.append([]) if token >= first else spans[-1].append(token)
    text = []
    for token in example["inputs"].tolist():
        text += spans.pop(0) if token >= first else [token]
    return text


def test_texts_are_joined_and_cut_and_nothing_is_lost():
    texts = [list(range(3, 3 + n)) for n in (40, 0, 7, 90)]
    lengths = {"inputs": 32, "targets": 12}
    examples = corrupted(texts, lengths)
    length, *_ = text_length(32, 0.15, 3.0)
    joined = [token for text in texts for token in text]
    assert len(examples) == -(-len(joined) // length)
    vocab_size = FEATURES["targets"].vocabulary.vocab_size
    restored = [undone(example, range(vocab_size - 100, vocab_size)) for example in examples]
    assert sum(restored, []) == joined
    # EOS is still to come.
    assert all(len(example["inputs"]) == 31 for example in examples[:-1])
    again, other = corrupted(texts, lengths), corrupted(texts, lengths, seed=1)
    assert all((a["inputs"] == b["inputs"]).all() for a, b in zip(examples, again, strict=True))
    assert any(
        (a["inputs"] != b["inputs"]).any() for a, b in zip(examples[:-1], other, strict=False)
    )


def test_a_long_text_gives_one_of_its_parts(monkeypatch):
    monkeypatch.setattr(subject, "_LONGEST_TEXT", 20)
    starts = set()
    for seed in range(8):
        (example,) = corrupted([list(range(3, 63))], {"inputs": 32, "targets": 12}, seed)
        vocab_size = FEATURES["targets"].vocabulary.vocab_size
        text = undone(example, range(vocab_size - 100, vocab_size))
        assert text == list(range(text[0], text[0] + 20))
        starts.add(text[0])
    assert starts == {3, 23, 43}


def test_too_little_room():
    with pytest.raises(InputError, match="inputs of 512 give targets of 114: give that many"):
        corrupted([[3]], {"inputs": 512, "targets": 64})
    with pytest.raises(InputError, match="task_feature_lengths is None"):
        corrupted([[3]], None)


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    """A vocabulary's file without sentinels, and one that holds two, as mT5's holds 100."""
    plain = train_sentencepiece(["some words of text"] * 9, tmp_path_factory.mktemp("v") / "s", 15)
    model = sentencepiece_model_pb2.ModelProto.FromString(plain.read_bytes())
    for number in (1, 0):
        model.pieces.add(piece=f"\u2581<extra_id_{number}>", score=0.0, type=4)
    held = plain.with_name("held.model")
    held.write_bytes(model.SerializeToString())
    return {"plain": str(plain), "held": str(held)}


@pytest.mark.parametrize(
    ("file", "extra_ids", "sentinels"),
    [(None, 0, 0), (None, 2, 2), ("plain", 0, 0), ("plain", 2, 2), ("held", 0, 2)],
)
def test_ordinary_tokens_are_no_sentinels(spiece, file, extra_ids, sentinels):
    vocabulary = (
        seqio.SentencePieceVocabulary(spiece[file], extra_ids)
        if file
        else seqio.ByteVocabulary(extra_ids)
    )
    features = dict.fromkeys(("inputs", "targets"), seqio.Feature(vocabulary=vocabulary))
    text = list(range(3, 15))
    # Of 1, 2 and 3 spans.
    for spans, inputs in ((1, 12), (2, 30), (3, 64)):
        assert text_length(inputs, 0.15, 3.0)[2] == spans
        lengths = {"inputs": inputs, "targets": 64}
        if spans <= sentinels:
            assert len(corrupted([text], lengths, features=features)) == 1
            continue
        message = f"ends in {sentinels} sentinels and inputs of {inputs} have up to {spans} spans: "
        with pytest.raises(InputError, match=message + r"give .* as many \(FILE:100, bytes:100\)"):
            corrupted([text], lengths, features=features)


def test_more_spans_than_the_sentinels_of_t5():
    assert text_length(1800, 0.15, 3.0)[2] == 100
    corrupted([[3]], {"inputs": 1800, "targets": 2000})
    with pytest.raises(InputError, match="ends in 100 sentinels .* up to 114 spans: .*FILE:114"):
        corrupted([[3]], {"inputs": 2048, "targets": 2000})
