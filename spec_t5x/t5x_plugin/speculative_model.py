"""What the speculative T5X models share: the draft, its parameters, T5X's return values.

A speculative model is T5X's in everything but ``predict_batch_with_aux``: training, scoring
and feature conversion stay T5X's own. Decoding runs the package's loops with the package's
network over the same parameters.
"""

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp

from spec_t5x.beams.hypotheses import BeamResult
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.decode_state import DecodeStats
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.draws import Stream, t5x_stream
from spec_t5x.t5x_plugin.decode_settings import SampleSettings
from spec_t5x.t5x_plugin.drafts import DraftSource
from spec_t5x.types import Array, Int, PyTree
from spec_t5x.verifiers import Verifier

# The draft's part of the tree of parameters.
DRAFT = "draft"


class SpeculativeModel:
    """To be mixed into a model of T5X, before it among the bases (``speculation.speculate``).

    The draft's parameters, where it has any, stand under ``draft`` in the model's tree.
    """

    def set_up(
        self,
        draft: DraftSource,
        gamma: int,
        verifier: Verifier,
        c: float | None = None,
        position: float = 0.0,
    ) -> None:
        """Sets what this model has beyond the stock one's attributes; see ``speculate``.

        Raises:
          InputError: ``gamma`` below 0, times below 0, or a network that cannot be run.
        """
        if gamma < 0:
            raise InputError(f"gamma is {gamma}: give at least 0 (0 is plain decoding)")
        self._network = self._make_network()
        self._draft = draft
        self._gamma = gamma
        self._verifier = verifier
        if position and c is None:
            raise InputError(f"position is {position} without c: give it too")
        self._costs = None
        if c is not None and gamma:
            self._costs = Costs.by_formula(
                c=c, position=position, largest=gamma, whole=verifier.tree(1) is not None
            )

    def _make_network(self) -> nn.Module:
        """The package's network of the sizes of ``self.module``."""
        raise NotImplementedError

    def _target(self, params: PyTree) -> Target:
        """The package's network with parameters of the stock model."""
        raise NotImplementedError

    @property
    def _eos_id(self) -> int:
        # As T5X has it for a vocabulary without one.
        return self.output_vocabulary.eos_id or 1

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        """T5X's variables, and the draft's beside them in each collection."""
        variables = super().get_initial_variables(rng, input_shapes, input_types)
        variables = dict(flax.core.unfreeze(variables))
        target = jax.eval_shape(self._target, variables["params"])
        drafts = self._draft.variables(rng, target, self.output_vocabulary)
        for collection, values in flax.core.unfreeze(drafts or {}).items():
            variables[collection] = {**variables[collection], DRAFT: values}
        return flax.core.freeze(variables)

    def read_draft(self, params: PyTree) -> PyTree:
        """Parameters of a draft by name, for the stock model with these ``params``.

        Raises:
          InputError: a draft of another target.
        """
        return self._draft.params(self._target(params), self.output_vocabulary)

    def _compute_logits(self, params, *args, **kwargs):
        return super()._compute_logits(split_params(params)[0], *args, **kwargs)

    def _sample(
        self,
        target: Target,
        draft: Draft,
        inputs: Int[Array, "batch source"],
        prompts: Int[Array, "batch width"],
        settings: SampleSettings,
        *,
        starts: Int[Array, "batch"],
        num_decodes: int,
        max_decode_len: int,
    ) -> Decoded:
        """What T5X's ``temperature_sample`` gives; ``starts`` is where it begins each row."""
        starts = jnp.repeat(starts, num_decodes)
        return speculative_decode(
            target,
            draft,
            inputs,
            prompts,
            random_stream(settings, self._verifier, starts, max_decode_len),
            settings.sampling,
            gamma=self._gamma,
            max_decode_len=max_decode_len,
            max_decode_steps=settings.max_decode_steps,
            num_decodes=num_decodes,
            verifier=self._verifier,
            eos_id=settings.eos_id,
            rescale_log_probs=settings.rescale_log_probs,
            pace=None if self._costs is None else Pace.start(self._costs, rows=starts.size),
        )


def split_params(params: PyTree) -> tuple[PyTree, PyTree | None]:
    """The target's parameters and the draft's, None where it has none."""
    params = dict(flax.core.unfreeze(params))
    return params, params.pop(DRAFT, None)


def random_stream(
    settings: SampleSettings,
    verifier: Verifier,
    starts: Int[Array, "rows"],
    num_steps: int,
) -> Array | Stream:
    """What the loops draw with: T5X's own chain of keys where the verifier can follow it."""
    rng = settings.rng
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)
    is_threefry = str(jax.random.key_impl(rng)) == "threefry2x32"
    if verifier.coupled:
        if not is_threefry:
            raise InputError(
                f"the key is of JAX's {jax.random.key_impl(rng)}: the coupled verifier follows "
                "T5X's threefry keys; leave set_hardware_rng_ops out, or take another verifier"
            )
        own_temperatures = settings.sampling.temperature.ndim == 1
        return t5x_stream(rng, starts, num_steps, same_for_rows=own_temperatures)
    if is_threefry:
        return rng
    # The hardware's generators draw the same for all rows of a vmap, as keys of rows are made.
    return jax.random.key(jax.random.bits(rng, dtype=jnp.uint32), impl="threefry2x32")


def pick_decodes(
    result: Decoded | BeamResult, return_all_decodes: bool
) -> tuple[Array, dict[str, Array]]:
    """T5X's return values: all decodes of an input, or the last, which scores highest."""
    aux = {"scores": result.scores, **acceptance_aux(result)}
    if return_all_decodes:
        return result.tokens, aux
    return result.tokens[:, -1], {name: values[:, -1] for name, values in aux.items()}


def acceptance_aux(result: Decoded | BeamResult) -> dict[str, Array]:
    """What there is to know of acceptance, each ``[batch, num_decodes, ...]``.

    Of sampling: ``target_calls``, ``appended``, ``proposed``, ``accepted``, ``verified`` and
    ``beta_sum`` (``DecodeStats``), and ``accepted_by_position [..., gamma]`` and
    ``verified_by_position``. Of a beam search: ``target_calls`` and ``steps`` of the input,
    the same for all its hypotheses.
    """
    stats = result.stats
    if isinstance(stats, DecodeStats):
        counts = ("target_calls", "appended", "proposed", "accepted", "verified", "beta_sum")
        by_position = ("accepted_by_position", "verified_by_position")
        has_positions = stats.accepted_by_position.shape[-1] > 0
        names = counts + by_position if has_positions else counts
        return {name: getattr(stats, name) for name in names}
    shape = result.scores.shape
    return {
        name: jnp.broadcast_to(getattr(stats, name)[:, None], shape)
        for name in ("target_calls", "steps")
    }
