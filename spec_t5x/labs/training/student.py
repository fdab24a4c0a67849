"""The draft that distillation trains: its network, trained parameters and logits over texts.

The training of an EAGLE head imitates drafting ("training-time test" of EAGLE-3, Li et al. 2025,
arXiv 2503.01840): the network is unrolled over several draft steps, and each step attends to the
inputs that it would have cached by then.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from spec_t5x.labs.training.interfaces import Inputs
from spec_t5x.labs.training.kept_layers import narrowed_params, with_narrow_head, with_shared
from spec_t5x.labs.training.learners import TargetReading, network_logits
from spec_t5x.models import partitioning
from spec_t5x.models.attention import mask_bias
from spec_t5x.models.eagle import EagleNetwork
from spec_t5x.models.logical_axes import partition_spec
from spec_t5x.models.narrow_head import NarrowHead, NarrowT5
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.t5 import CachedNetwork, NetworkConfig, Transformer
from spec_t5x.types import Array, Float, Float32, Int, Key, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Student:
    """The draft's network and its trained parameters."""

    config: NetworkConfig
    # The trained parameters: all, or those not shared with the target (``own_params``).
    params: PyTree
    # If the draft shares the target's encoder and embedding, which are frozen: the index of the
    # target's decoder layer that each of the draft's is copied from. None if it shares nothing.
    shared_layers: tuple[int, ...] | None = None
    # The tokens of a pruned output layer, which only a draft that shares parameters has; None if
    # the layer has the whole vocabulary.
    head: NarrowHead | None = None
    # Number of drafting steps that an EAGLE head (``models.eagle``) learns; 0 for other drafts.
    unrolled_steps: int = 0

    def narrowed(self, target_params: PyTree, ids: np.ndarray) -> "Student":
        """Returns the student with its output layer pruned to the tokens ``ids``."""
        whole = self.whole(self.params, target_params)
        params = narrowed_params(self.params, whole, self.config, ids)
        # The pruned layer is trained, in float32, even if it was the target's embedding.
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        head = NarrowHead.create(ids, self.config.vocab_size)
        return dataclasses.replace(self, params=params, head=head)

    def param_shardings(self, mesh: Mesh) -> PyTree:
        """Returns a ``NamedSharding`` for each of ``params``."""
        shardings = partitioning.param_shardings(self.config, mesh)
        if self.shared_layers is not None:
            shardings = own_params(shardings)
        if self.head is not None:
            shape = self.params["narrow_head"]["kernel"].shape
            spec = partition_spec(shape, ("embed", "vocab"), partitioning.RULES, mesh)
            shardings = with_narrow_head(shardings, NamedSharding(mesh, spec))
        return shardings

    def whole(self, params: PyTree, target_params: PyTree) -> PyTree:
        """Returns all parameters of the network: ``params``, and those shared with the target."""
        if self.shared_layers is None:
            return params
        return with_shared(params, target_params, self.shared_layers)

    def model(self, params: PyTree, target_params: PyTree) -> T5Model:
        """Returns the draft as a model: with ``params``, and those shared with the target."""
        model = T5Model.create(self.whole(params, target_params), self.config)
        if self.head is None:
            return model
        return NarrowT5.narrowed(model, self.head, params["narrow_head"]["kernel"])

    def logits(
        self,
        params: PyTree,
        target_params: PyTree,
        inputs: Inputs,
        read_by_target: TargetReading | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float32[Array, "batch length vocab"]:
        """Computes the draft's logits for each token of a text, teacher-forced.

        An EAGLE head needs ``read_by_target``; its states differ by drafting step. Successive
        tokens use the steps in turn, so that one call of the output layer trains all steps.
        """
        if self.shared_layers is None:
            return network_logits(self.config, params, inputs, dropout_key)
        source, shifted, text = inputs
        learns, steps = dropout_key is not None, self.unrolled_steps

        def read(network: CachedNetwork):
            if steps:
                given = read_by_target.encoded, source, shifted, read_by_target.states, steps
                unrolled = unroll(network, *given, enable_dropout=learns)
                in_turn = _steps_in_turn(shifted.shape, steps)[..., None]
                states = unrolled[0]
                for step in range(1, steps):
                    states = jnp.where(in_turn == step, unrolled[step], states)
            else:
                # The encoder is the target's, which is frozen and has no dropout.
                given = network.encode(source), source, shifted, text
                states = network.decode_states(*given, enable_dropout=learns)
            if self.head is None:
                return network.logits(states)
            return self.head.logits(params["narrow_head"]["kernel"], states)

        network = EagleNetwork(self.config) if steps else Transformer(self.config)
        variables = {"params": self.whole(params, target_params)}
        return network.apply(
            variables, method=read, rngs={"dropout": dropout_key} if learns else None
        )


def unroll(
    network: EagleNetwork,
    encoded: Float[Array, "batch source target_embed"],
    source: Int[Array, "batch source"],
    shifted: Int[Array, "batch length"],
    states: Float[Array, "batch length target_states"],
    num_steps: int,
    *,
    enable_dropout: bool = False,
) -> list[Float[Array, "batch length embed"]]:
    """Returns a head's states at all positions of a text in its first, second, … draft step.

    The states of step i are undefined at the first i positions; both count from 0. ``encoded``
    and ``states`` are the target's states of the source and of the text, and ``shifted`` is
    the text with its start token first.
    """
    cross_bias, decoder = mask_bias((source > 0)[:, None, None, :]), network.decoder
    distances = jnp.arange(shifted.shape[1])[:, None] - jnp.arange(shifted.shape[1])[None]
    earlier: list[list[Array]] = [[] for _ in decoder.layers]
    unrolled, states = [], network.reduction(states)
    for step in range(num_steps):
        # Text before the drafted tokens was fed with the target's states.
        seen = [distances >= step, *(distances == step - i for i in range(1, step + 1))]
        masks = [mask_bias(each)[None, None] for each in seen]
        states = network.fused(shifted, jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0))))
        for layer, inputs in zip(decoder.layers, earlier, strict=True):
            relpos = layer.relpos_bias or decoder.relpos_bias
            bias = relpos.full(shifted.shape[1], False)
            *before, own = [bias + mask for mask in masks]
            before = list(zip(inputs, before, strict=True))
            inputs.append(states)
            states = layer(states, encoded, own, cross_bias, not enable_dropout, before)
        states = decoder.decoder_norm(states)
        unrolled.append(states)
    return unrolled


def _steps_in_turn(shape: tuple[int, int], num_steps: int) -> Int[Array, "batch length"]:
    """Assigns a drafting step, from 0, to each token: at most the token's position in the text."""
    rows, positions = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return jnp.minimum((rows + positions) % num_steps, positions)
