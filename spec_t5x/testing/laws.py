"""Does a draft, or a verifier, keep the target's law? Thousands of texts say.

    statistic, threshold = chi_square(decode_many(my_draft, gamma=2), sampling(1.0))
    assert statistic < threshold

The target is a table of four tokens, whose texts of up to four tokens are enumerated.
Rows of three kinds, of unequal sources, prompts and lengths, share a batch, so that they
advance unequally.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from spec_t5x.decoding import DEFAULT_VERIFIER, speculative_decode
from spec_t5x.distributions import Sampling, sampling
from spec_t5x.interfaces import Draft, Target
from spec_t5x.outputs import Decoded
from spec_t5x.testing.toy_models import PrefixTarget, TableTarget, sequence_law
from spec_t5x.types import EOS_ID
from spec_t5x.verifiers import TreeVerifier, Verifier

VOCAB_SIZE = 4
LENGTH = 4
ROWS = 30_000
# Source, prompt and tokens to generate of each kind; kind k has rows k, k + 3, k + 6 …
KINDS = [([2, 3], (), 4), ([3, 0], (2,), 2), ([2, 2], (EOS_ID, 3), 1)]
# How often chance alone passes a threshold.
CHANCE = 1e-6


@functools.cache
def target() -> TableTarget:
    """The target whose law is known; a fifth of its probabilities are zero."""
    return TableTarget.create(seed=0, vocab_size=VOCAB_SIZE, zeros=0.2)


@functools.cache
def other_model() -> TableTarget:
    """Another model of the same kind, to draft with."""
    return TableTarget.create(seed=1, vocab_size=VOCAB_SIZE, zeros=0.2)


def decode_many(
    draft: Draft,
    gamma: int,
    settings: Sampling | None = None,
    verifier: Verifier | TreeVerifier = DEFAULT_VERIFIER,
    model: Target | None = None,
) -> Decoded:
    """Speculative decoding of all rows, at temperature 1 unless told otherwise.

    ``model`` stands for the target; it has four tokens.
    """
    sources, prompts, steps = [], np.zeros((len(KINDS), 3), np.int32), []
    for row, (source, prompt, limit) in enumerate(KINDS):
        sources.append(source)
        prompts[row, 1 : 1 + len(prompt)] = prompt
        steps.append(limit)
    many = functools.partial(np.tile, reps=(ROWS // len(KINDS), 1))
    decoded = speculative_decode(
        model or target(),
        draft,
        jnp.asarray(many(sources)),
        jnp.asarray(many(prompts)),
        jax.random.key(7),
        sampling(1.0) if settings is None else settings,
        gamma=gamma,
        verifier=verifier,
        max_decode_len=LENGTH,
        max_decode_steps=jnp.asarray(many(np.array(steps)[:, None])[:, 0]),
    )
    return jax.device_get(decoded)


def chi_square(
    decoded: Decoded, settings: Sampling, model: PrefixTarget | None = None
) -> tuple[float, float]:
    """The statistic of the texts against the target's law, and its threshold.

    The threshold is passed by chance once in a million times. A text of probability
    zero makes the statistic infinite. ``model`` stands for the target.
    """
    statistic, freedom, found = 0.0, 0, _texts(decoded)
    for kind, (source, prompt, steps) in enumerate(KINDS):
        law = sequence_law(
            model or target(),
            source,
            settings,
            max_decode_len=min(LENGTH, len(prompt) + steps),
            prompt=prompt,
        )
        counts = dict.fromkeys(law, 0)
        for text in found[kind :: len(KINDS)]:
            if text not in law:
                return np.inf, 0.0
            counts[text] += 1
        observed = np.array(list(counts.values()), float)
        expected = np.array(list(law.values())) * ROWS / len(KINDS)
        statistic += np.sum((observed - expected) ** 2 / expected)
        freedom += len(law) - 1
    return float(statistic), float(stats.chi2.ppf(1 - CHANCE, freedom))


def _texts(decoded: Decoded) -> list[tuple[int, ...]]:
    lengths = decoded.lengths[:, 0].tolist()
    rows = np.asarray(decoded.tokens[:, 0])
    return [tuple(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]
