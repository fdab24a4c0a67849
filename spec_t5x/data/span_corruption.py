"""T5's pre-training objective as seqio preprocessors (Raffel et al. 2020, section 3.1.4).

Texts are joined and cut into pieces of one length. In each, spans of tokens are noise: in
the inputs a sentinel stands in the place of each of them, in the targets in the place of
what is between them. Sentinels are the vocabulary's last ids, counted down on both sides:
with T5's 100 extra ids X is ``<extra_id_0>`` and Y ``<extra_id_1>``.

    text      Thank you for inviting me to your party last
    inputs    Thank you X me to your party Y
    targets   X for inviting Y last
"""

import itertools
import re
from collections.abc import Mapping

import seqio
import tensorflow as tf

from spec_t5x.errors import InputError

NOISE_DENSITY = 0.15
MEAN_SPAN_LENGTH = 3.0

# Of a text that is longer, one part is taken.
_LONGEST_TEXT = 65536
# Texts that are joined before they are cut.
_JOINED_TEXTS = 128
_SENTINELS_OF_T5 = 100


def span_corruption(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, seqio.Feature],
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
) -> tf.data.Dataset:
    """From ``targets``, the ids of texts, makes ``inputs`` and ``targets`` without EOS.

    Args:
        dataset: of tokenised texts.
        sequence_length: tokens of ``inputs`` and ``targets``, EOS included. The inputs are
            filled; the targets must have room for what they then hold.
        output_features: the task's; the targets' vocabulary has the sentinels.
        noise_density: share of the tokens that are noise.
        mean_span_length: of noise, in tokens.

    Raises:
        InputError: the targets have too little room, or the vocabulary too few sentinels.
    """
    if not {"inputs", "targets"} <= set(sequence_length or ()):
        raise InputError(
            f"task_feature_lengths is {sequence_length}: span corruption cuts texts by them, give "
            "{'inputs': 512, 'targets': 114}"
        )
    length, needed, spans = text_length(sequence_length["inputs"], noise_density, mean_span_length)
    if needed > sequence_length["targets"]:
        raise InputError(
            f"task_feature_lengths has targets {sequence_length['targets']} and inputs of "
            f"{sequence_length['inputs']} give targets of {needed}: give that many"
        )
    vocabulary = output_features["targets"].vocabulary
    sentinels, sentinels_end = _sentinels(vocabulary), vocabulary.vocab_size
    if spans > sentinels:
        raise InputError(
            f"the vocabulary ends in {sentinels} sentinels and inputs of "
            f"{sequence_length['inputs']} have up to {spans} spans: give a vocabulary with as many "
            f"(FILE:{max(spans, _SENTINELS_OF_T5)}, bytes:{max(spans, _SENTINELS_OF_T5)}), or "
            "shorter inputs"
        )

    @seqio.map_over_dataset(num_seeds=2)
    def corrupt(example, seeds):
        tokens = example["targets"]
        noise = noise_mask(tf.size(tokens), tf.stack(seeds), noise_density, mean_span_length)
        return {
            "inputs": mark_spans(tokens, noise, sentinels_end),
            "targets": mark_spans(tokens, tf.logical_not(noise), sentinels_end),
        }

    return corrupt(_pieces(dataset, length))


def text_length(
    inputs_length: int, noise_density: float, mean_span_length: float
) -> tuple[int, int, int]:
    """Tokens of a text that fills the inputs, of the targets it gives, and its spans.

    >>> text_length(512, 0.15, 3.0)
    (568, 114, 28)
    """
    # One token less than the inputs' always fits; above are more than the text alone fills.
    tokens = tf.range(inputs_length - 1, int(inputs_length / (1 - noise_density)) + 2)
    noise, spans = _noise_and_spans(tokens, noise_density, mean_span_length)
    # A sentinel for each span, and EOS.
    fits = tokens - noise + spans + 1 <= inputs_length
    longest = int(tf.where(fits)[-1, 0])
    return int(tokens[longest]), int((noise + spans)[longest]) + 1, int(spans[longest])


def noise_mask(
    length: tf.Tensor, seeds: tf.Tensor, noise_density: float, mean_span_length: float
) -> tf.Tensor:
    """Which tokens are noise, bool [length].

    Their number and that of the spans follow from the length; subject to these, and to a
    beginning that is no noise, all masks are equally likely.

    Args:
        length: int32 scalar.
        seeds: int32 [2, 2].
        noise_density, mean_span_length: see ``span_corruption``.
    """
    # Two at least: one of each kind.
    tokens = tf.maximum(length, 2)
    noise, spans = _noise_and_spans(tokens, noise_density, mean_span_length)
    lengths = tf.stack(
        [
            _random_lengths(tokens - noise, spans, seeds[1]),
            _random_lengths(noise, spans, seeds[0]),
        ],
        axis=1,
    )
    return tf.repeat(tf.tile([False, True], [spans]), tf.reshape(lengths, [-1]))[:length]


def mark_spans(tokens: tf.Tensor, is_span: tf.Tensor, sentinels_end: int) -> tf.Tensor:
    """The tokens with a sentinel in the place of each span.

    Args:
        tokens: integers [length].
        is_span: bool [length].
        sentinels_end: the first span gets the id before it, the second the one before that.
    """
    is_start = is_span & ~tf.pad(is_span[:-1], [[1, 0]])
    sentinels = sentinels_end - tf.cumsum(tf.cast(is_start, tokens.dtype))
    return tf.boolean_mask(tf.where(is_start, sentinels, tokens), is_start | ~is_span)


def _sentinels(vocabulary: seqio.Vocabulary) -> int:
    """How many of the vocabulary's last ids are sentinels."""
    if not isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return vocabulary.extra_ids
    # Its file may hold some, as mT5's, or have had them added.
    pieces = map(vocabulary.tokenizer.id_to_piece, reversed(range(vocabulary.vocab_size)))
    sentinels = itertools.takewhile(re.compile(r"\u2581?<extra_id_\d+>").fullmatch, pieces)
    return len(list(sentinels))


def _noise_and_spans(
    length: tf.Tensor, noise_density: float, mean_span_length: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Tokens of noise, and their spans, in texts of so many tokens: int32, of one shape.

    Lengths are reckoned and masks are drawn by this one function: in float32, as the masks
    of the t5 library, 190 * 0.15 is above the tie of 28.5, and in Python's floats it is on it.
    """
    # Two at least: one of each kind.
    tokens = tf.maximum(length, 2)
    noise = _rounded(tf.cast(tokens, tf.float32) * noise_density)
    noise = tf.clip_by_value(noise, 1, tokens - 1)
    spans = tf.maximum(_rounded(tf.cast(noise, tf.float32) / mean_span_length), 1)
    # As many spans of text, and in one of them there may be too little text.
    return noise, tf.minimum(spans, tokens - noise)


def _rounded(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.round(value), tf.int32)


def _random_lengths(total: tf.Tensor, parts: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """So many whole numbers from 1 that add up to ``total``, all choices equally likely."""
    is_cut = seqio.utils.stateless_shuffle(tf.range(total - 1) < parts - 1, seed)
    ends = tf.cast(tf.where(is_cut)[:, 0], tf.int32) + 1
    return tf.concat([ends, [total]], 0) - tf.concat([[0], ends], 0)


def _pieces(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """The texts, joined and cut; the last piece of those that are joined may be shorter."""

    @seqio.map_over_dataset(num_seeds=1)
    def one_part(example, seed):
        tokens = example["targets"]
        parts = -(-tf.size(tokens) // _LONGEST_TEXT)
        first = _LONGEST_TEXT * tf.random.stateless_uniform([], seed, 0, parts, tf.int32)
        return tokens[first : first + _LONGEST_TEXT]

    def cut(texts):
        tokens = texts.flat_values
        pieces = -(-tf.size(tokens) // length)
        rest = pieces * length - tf.size(tokens)
        lengths = tf.concat([tf.repeat(length, pieces - 1), [length - rest]], 0)
        rows = tf.reshape(tf.pad(tokens, [[0, rest]]), [pieces, length])
        return tf.data.Dataset.from_tensor_slices((rows, lengths))

    dataset = one_part(dataset.filter(lambda example: tf.size(example["targets"]) > 0))
    dataset = dataset.ragged_batch(_JOINED_TEXTS).flat_map(cut)
    return dataset.map(lambda row, size: {"targets": row[:size]})
