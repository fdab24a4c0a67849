"""T5X's ``InteractiveModel``, which its notebooks use, with drafts by name."""

import pytest

pytest.importorskip("t5x.interactive_model", reason="needs T5X")

import jax
import numpy as np
import seqio
from t5x import adafactor, decoding, models, partitioning
from t5x.interactive_model import InteractiveModel

from spec_t5x.checkpoints.loading import load
from spec_t5x.t5x_plugin.drafts import NamedDraft
from spec_t5x.t5x_plugin.speculation import speculate
from tests.conftest import ENGLISH, GERMAN
from tests.t5x_plugin.toy_models import t5x_network

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

BATCH = 4
LENGTHS = {"inputs": 24, "targets": 20}
# The second batch is not full.
EXAMPLES = [{"input": ENGLISH[row], "target": GERMAN[row]} for row in range(6)]


@pytest.fixture
def makes_keys_as_before():
    """Sets the kind of random keys back, which an ``InteractiveModel`` changes."""
    kind = jax.config.jax_default_prng_impl
    yield
    jax.config.update("jax_default_prng_impl", kind)


def mean_score(targets, predictions, aux_values):
    """Has the arguments by which T5X tells kinds of metrics apart."""
    del targets, predictions
    return {"score": float(np.mean(aux_values["scores"]))}


@pytest.mark.usefixtures("makes_keys_as_before")
def test_all_that_it_does_is_the_stock_models(launches, drafts_of_pair, tmp_path):
    vocabulary = seqio.SentencePieceVocabulary(str(launches.vocabulary), extra_ids=0)
    stock = models.EncoderDecoderModel(
        module=t5x_network(load(drafts_of_pair / "target").config),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=adafactor.Adafactor(decay_rate=0.8),
        decode_fn=decoding.temperature_sample,
    )
    shapes = {"encoder_input_tokens": (BATCH, LENGTHS["inputs"])}
    for name in ("input_tokens", "target_tokens", "loss_weights"):
        shapes[f"decoder_{name}"] = (BATCH, LENGTHS["targets"])

    def use(model, directory):
        interactive = InteractiveModel(
            batch_size=BATCH,
            task_feature_lengths=LENGTHS,
            output_dir=str(directory),
            partitioner=partitioning.PjitPartitioner(num_partitions=1),
            model=model,
            dtype="float32",
            restore_mode="specific",
            checkpoint_path=launches.checkpoint("target_legacy"),
            input_shapes=shapes,
        )
        with interactive.trainer:
            before, aux = interactive.predict_with_aux(EXAMPLES)
            scores = [score for _, score in interactive.score(EXAMPLES)]
            metrics = interactive.evaluate(EXAMPLES, [mean_score])
            interactive.train_step(EXAMPLES)
            after, trained = interactive.predict_with_aux(EXAMPLES)
        saved = load(directory / "checkpoint_8", vocabulary=f"{launches.vocabulary}:0").params
        texts = [text for _, text in before + after]
        return texts, [*aux["scores"], *scores, metrics["score"], *trained["scores"]], saved, aux

    texts, scores, saved, _ = use(stock, tmp_path / "stock")
    assert len(set(texts)) > 2
    # The second has parameters, which the checkpoints lack.
    for name in ("copy", f"mixed:{drafts_of_pair}/shared"):
        model = speculate(stock, NamedDraft(name=name), gamma=3)
        found = use(model, tmp_path / name.partition(":")[0])
        assert found[0] == texts
        np.testing.assert_allclose(found[1], scores, atol=1e-3)
        jax.tree.map(np.testing.assert_array_equal, found[2], saved)
        assert len(found[3]["target_calls"]) == len(EXAMPLES)
        assert sum(found[3]["accepted"]) > 0
