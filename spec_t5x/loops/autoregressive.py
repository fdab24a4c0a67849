"""Plain decoding: the speculative loop at gamma 0, with one target call for each token.

Plain decoding is the baseline of every speed-up and the oracle of the tests.
"""

from typing import Any

from spec_t5x.interfaces import Target
from spec_t5x.loops import compiled
from spec_t5x.loops.arguments import check_given
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, NoDraft
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.draws import Stream
from spec_t5x.types import Array, Int, Key, PyTree
from spec_t5x.verifiers import CoupledVerifier


@compiled.jit(
    check=check_given,
    static_argnames=("max_decode_len", "num_decodes", "coupled", "eos_id", "rescale_log_probs"),
)
def autoregressive_decode(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    rng: Key[Array, "*batch"] | Stream,
    settings: Sampling,
    *,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    coupled: bool = False,
    **options: Any,
) -> Decoded:
    """Decodes with the target alone, in one compiled program; ``Decoded.stats`` is None.

    Args:
      target, inputs, prompts, rng, settings, max_decode_steps: as in ``speculative_decode``.
      coupled: draw tokens with ``CoupledVerifier``'s noise: the text equals that of coupled
        speculative decoding with the same ``rng`` (and T5X's, if ``rng`` is a ``T5XStream``).
      **options: ``max_decode_len``, ``num_decodes``, ``eos_id`` and ``rescale_log_probs``, fields
        of ``Loop``.

    Raises:
      InputError: prompts longer than ``max_decode_len``, or T5X's stream without ``coupled``.
    """
    verifier = CoupledVerifier() if coupled else DEFAULT_VERIFIER
    given = target, NoDraft(target.vocab_size), inputs, prompts, rng, settings
    # By keyword, so that a gamma or verifier among the options is refused.
    decoded = speculative_decode(
        *given, gamma=0, verifier=verifier, max_decode_steps=max_decode_steps, **options
    )
    return decoded.replace(stats=None)
