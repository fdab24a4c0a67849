"""Loss, gradients and a step of the optimizer equal those of transformers' T5 in PyTorch."""

import copy
import functools
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.huggingface.t5 import tensor_names
from spec_t5x.checkpoints.loading import load
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.learners import Network
from spec_t5x.labs.training.losses import token_losses
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.trainer import TrainState, make_train_step
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.types import PyTree
from tests.torch_t5 import SIZES

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Relative to the largest number of a tensor: two implementations in float32.
TOLERANCE = 1e-4
VOCAB_SIZE = 224
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-2, 0.1, 0.5
# T5 1.0 is ("relu", tied), T5 1.1 ("gated-gelu", untied).
VERSIONS = {"1.0": ("relu", True), "1.1": ("gated-gelu", False)}


class Pair(NamedTuple):
    """One model, theirs and ours."""

    theirs: Any
    params: PyTree
    config: T5Config


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_pair):
    """Provides ``pair(version)``: a model of transformers' without dropout, and ours of it."""

    @functools.cache
    def make(version: str) -> Pair:
        activation, tied = VERSIONS[version]
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=VOCAB_SIZE,
            **SIZES,
            num_layers=1,
            decoder_start_token_id=0,
            dropout_rate=0.0,
            feed_forward_proj=activation,
            tie_word_embeddings=tied,
        )
        theirs = transformers.T5ForConditionalGeneration(config)
        if not tied:
            # Version 5 ties every T5 that it builds.
            theirs.lm_head = torch.nn.Linear(config.d_model, VOCAB_SIZE, bias=False)
            theirs.all_tied_weights_keys = {}
        directory = tmp_path_factory.mktemp("theirs")
        theirs.save_pretrained(directory)
        # Some vocabulary; the tests work on ids.
        shutil.copy(tiny_pair / "target" / "spiece.model", directory)
        loaded = load(directory)
        assert loaded.config.logits_via_embedding == tied
        return Pair(theirs.train(), loaded.params, loaded.config)

    return make


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes sources, targets shifted right and targets, of various lengths, padded."""
    rng = np.random.default_rng(0)
    source, target = (rng.integers(3, VOCAB_SIZE, (4, n)).astype(np.int32) for n in (11, 9))
    for tokens, lengths in ((source, (11, 5, 8, 2)), (target, (4, 9, 1, 6))):
        for row, length in zip(tokens, lengths, strict=True):
            row[length - 1], row[length:] = 1, 0
    return source, np.pad(target[:, :-1], ((0, 0), (1, 0))), target


def their_loss(theirs, batch, label_smoothing=0.0, z_loss=0.0):
    """Computes the mean loss of the tokens, and its gradients."""
    theirs.zero_grad()
    source, shifted, target = (torch.tensor(each).long() for each in batch)
    given = {"input_ids": source, "attention_mask": source != 0, "decoder_input_ids": shifted}
    logits = theirs(**given).logits[target != 0]
    smoothing = {"label_smoothing": label_smoothing}
    loss = torch.nn.functional.cross_entropy(logits, target[target != 0], **smoothing)
    loss += z_loss * torch.logsumexp(logits, dim=-1).square().mean()
    loss.backward()
    return float(loss.detach())


def tensors_of(theirs, config: T5Config, value) -> dict[str, np.ndarray]:
    """Returns ``value`` of each of their parameters by our paths, in our form."""
    named = dict(theirs.named_parameters())
    found = {}
    for path, (name, is_transposed) in tensor_names(config).items():
        tensor = value(named[name]).detach().numpy().copy()
        found[path] = tensor.T if is_transposed else tensor
    # Each of theirs has a counterpart; a tied output layer has no separate name.
    assert len(found) == len(named)
    return found


@pytest.mark.parametrize(
    ("version", "options"), [("1.0", {}), ("1.1", {"label_smoothing": 0.1, "z_loss": 0.01})]
)
def test_loss_and_gradients(pair, batch, version, options):
    theirs, params, config = pair(version)
    expected = their_loss(theirs, batch, **options)

    @jax.jit
    @jax.value_and_grad
    def our_loss(params):
        logits = Transformer(config).apply({"params": params}, *batch, enable_dropout=False)
        sums = token_losses(logits, batch[2], **options)
        return sums.loss / sums.num_tokens

    loss, gradients = our_loss(params)
    assert float(loss) == pytest.approx(expected, rel=TOLERANCE)
    flat = flatten_dict(gradients, sep="/")
    their_gradients = tensors_of(theirs, config, lambda parameter: parameter.grad)
    assert set(flat) == set(their_gradients)
    for path, gradient in their_gradients.items():
        largest = np.abs(gradient).max()
        assert largest > 0, path
        np.testing.assert_allclose(
            flat[path], gradient, rtol=0, atol=TOLERANCE * largest, err_msg=path
        )


def test_a_step_of_adamw(pair, batch):
    """Weight decay is that of matrices alone; ``test_trainer`` has clipping, which shows later."""
    theirs, params, config = pair("1.1")
    theirs = copy.deepcopy(theirs)
    before = tensors_of(theirs, config, lambda parameter: parameter)
    their_loss(theirs, batch)
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP_NORM)
    assert norm > CLIP_NORM
    gradients = tensors_of(theirs, config, lambda parameter: parameter.grad)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), eps=1e-8).step()
    after = tensors_of(theirs, config, lambda parameter: parameter)
    options = OptimizerOptions(clip_norm=CLIP_NORM, weight_decay=WEIGHT_DECAY)
    optimizer = options.optimizer(lambda step: LEARNING_RATE)
    assert config.dropout_rate == 0.0
    step = make_train_step(Network(config, TrainOptions(steps=1, z_loss=0.0)), optimizer)
    params = jax.tree.map(lambda leaf: jax.numpy.array(leaf), params)
    state = TrainState(step=jax.numpy.int32(0), params=params, opt_state=optimizer.init(params))
    state, _ = step(state, batch, jax.random.key(0), None)

    ours = flatten_dict(state.params, sep="/")
    for path, expected in after.items():
        # The first step is the sign of the gradient: where that is next to nothing, rounding
        # decides. Where it is nothing, as of tokens that do not occur, both decay.
        size = np.abs(gradients[path])
        clear = (size > 1e-3 * size.max()) | (size == 0)
        assert clear.mean() > 0.9, path
        moved = np.abs(expected - before[path])
        assert moved[size > 0].min() > 0
        found, atol = np.asarray(ours[path])[clear], TOLERANCE * moved.max()
        np.testing.assert_allclose(found, expected[clear], rtol=0, atol=atol, err_msg=path)
