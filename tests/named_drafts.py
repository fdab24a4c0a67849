"""Cases of all registered drafts, for tests that run with every draft.

The tests fail if the registry has a name without a case here.
"""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from spec_t5x import registry
from spec_t5x.checkpoints.loading import load
from spec_t5x.labs.training.exports import save_ngram, save_shared_draft
from spec_t5x.labs.training.kept_layers import keep_layers, narrowed_params
from spec_t5x.labs.training.ngram_counts import count_ngrams, join_texts
from spec_t5x.models.narrow_head import NarrowHead
from spec_t5x.models.shared_params import own_params
from spec_t5x.types import EOS_ID
from tests.toy_drafts import tiny_head

# Index of the last of the target's two layers.
_LAYERS = (1,)
# ``{}`` becomes the directory that ``write`` filled. A name with an empty list is tested within the
# case of another draft. Drafts of contrib have their cases in ``tests/contrib``.
_CASES = {
    "transformer": [],
    "unigram": [],
    "bigram": [],
    "ngram": [],
    "copy": [],
    "uniform": ["uniform"],
    "eagle": ["eagle:{}/eagle"],
    # A directory as ``spec-t5x distill`` writes it.
    "shared_encoder": ["{}/narrow"],
    "early_exit": ["early_exit:1"],
    "int8": ["int8"],
    "int4": ["int4"],
    "mixed": ["mixed:{}/shared"],
}
_OTHERS = {
    name: importlib.import_module(f"tests.contrib.{name}.named")
    for name in registry.names("draft")
    if name not in _CASES
}
EVERY = [case for cases in _CASES.values() for case in cases]
EVERY += [case for other in _OTHERS.values() for case in other.CASES]
# Drafts with parameters of several kinds, for tests on several devices.
SPREAD = [case for case in EVERY if case not in ("uniform", "early_exit:1", "int4")]
every_named_draft = pytest.mark.parametrize("draft", EVERY)


def named(draft: str, directory: Path) -> str:
    """Returns a case of ``EVERY`` as a value of ``--draft``: ``{}`` becomes the directory."""
    return draft.replace("{}", str(directory))


def write(directory: Path) -> None:
    """Writes to ``directory`` the files of all drafts for the target in ``directory/target``."""
    target, rng = load(directory / "target"), np.random.default_rng(0)
    texts = [[*rng.integers(3, 9, 12).tolist(), EOS_ID] for _ in range(40)]
    counted = count_ngrams(join_texts(texts), target.vocabulary.vocab_size, order=3)
    save_ngram(directory / "ngrams", counted, target.vocabulary)

    def noisy(leaf):
        return leaf * (1 + 0.1 * rng.normal(size=leaf.shape)).astype(np.float32)

    encoder = range(target.config.num_encoder_layers)
    params, config = keep_layers(target.params, target.config, encoder=encoder, decoder=_LAYERS)
    params = jax.tree.map(noisy, params)
    own, head = own_params(params), NarrowHead.create(np.arange(1, 128, 2), config.vocab_size)
    narrow = narrowed_params(own, params, config, head.ids)
    eagle, its_config = tiny_head(target.bind(), _LAYERS, target.config.emb_dim - 8, (0,))
    for name, tree, sizes, options in (
        ("shared", own, config, {}),
        ("narrow", narrow, config, {"head": head}),
        ("eagle", narrowed_params(eagle, eagle, its_config, head.ids), its_config, {"head": head}),
    ):
        save_shared_draft(directory / name, tree, sizes, _LAYERS, target, **options)
    for other in _OTHERS.values():
        other.write(directory, target)
