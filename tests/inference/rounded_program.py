"""Program that ``test_placement.py`` runs with 2 simulated devices.

It loads a pair onto both, with matrices that are rounded as they are read, and prints as JSON what
the devices hold, and whether weights are those of a model that is rounded as it is bound.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.loading import load, open_model
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.generation import Generator
from spec_t5x.inference.placement import Placement
from spec_t5x.labs.training.exports import model_in_memory
from spec_t5x.models.cached_model import CachedModel
from tests.toy_t5 import tiny_t5

PLACEMENT = Placement.create(model_parallel=2, batch_size=2)


def same(model: CachedModel, other: CachedModel) -> bool:
    """Tells whether two models have the same weights and shardings."""
    leaves = [jax.tree.leaves(each.weights) for each in (model, other)]
    return jax.tree.structure(model) == jax.tree.structure(other) and all(
        np.array_equal(ours, theirs) and ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        for ours, theirs in zip(*leaves, strict=True)
    )


def held(opened: StoredModel, weights: str) -> tuple[CachedModel, list[int]]:
    """Returns the model, and the bytes of matrices on device 0 after each of them was read."""
    matrices, sizes = [], []

    def read_params(self, *, packed, **options):
        def note(path, param):
            found = packed(path, param)
            if path.endswith("/kernel"):
                matrices.extend(jax.tree.leaves(found))
                sizes.append(sum(leaf.addressable_shards[0].data.nbytes for leaf in matrices))
            return found

        return whole(self, packed=note, **options)

    whole, StoredModel.read_params = StoredModel.read_params, read_params
    options = {"dtype": "float32", "for_decoding": True, "shardings": PLACEMENT.params}
    loaded = opened.load(**options, weights=weights)
    StoredModel.read_params = whole
    assert loaded.weights == "auto"
    return loaded.bind(), sizes


def placed(model: CachedModel, opened: StoredModel) -> CachedModel:
    generator = Generator(target=model, vocabulary=opened.vocabulary, max_source_len=8)
    return PLACEMENT.generator(generator).target


def main(directory: Path) -> dict[str, Any]:
    opened, found = open_model(directory / "target"), {}
    model = tiny_t5(0, vocab_size=128, logits_via_embedding=True)
    tied = model_in_memory("tied", model.params, model.config, opened.vocabulary)
    for weights, each in {"int8": opened, "int4": tied}.items():
        whole = held(each, "auto")[1]
        model, sizes = held(each, weights)
        later = each.load(dtype="float32").bind(weights)
        found[weights] = {
            "same": same(placed(model, each), placed(later, each)),
            "share": sizes[-1] / whole[-1],
        }
    options = DraftOptions(dtype="float32", weights="int8")
    pair = directory / "target", directory / "draft"
    generator = Generator.load(*pair, options, shardings=PLACEMENT.params, weights="int8")
    query = flatten_dict(generator.draft.model.weights)[
        "decoder", "layers_0", "self_attention", "query", "kernel"
    ]
    found["draft"] = {"query": list(query.values.sharding.spec)}
    alone = load(directory / "draft", for_decoding=True).bind("int8")
    found["draft"]["same"] = same(generator.draft.model, placed(alone, opened))
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
