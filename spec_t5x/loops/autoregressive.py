"""Plain decoding: one target call for each token, which is the speculative loop at gamma 0.

The baseline that every speed-up is quoted against and the oracle of the tests. It
shares all that decides the text (distributions, end of sequence, limits, keys)
with speculative decoding, and gets the same care.
"""

import functools

import jax

from spec_t5x.interfaces import Target
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops import speculative
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, NoDraft
from spec_t5x.loops.outputs import Decoded
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.draws import Stream
from spec_t5x.types import EOS_ID, Array, EndOfSequence, Int, Key, PyTree
from spec_t5x.verifiers import CoupledVerifier


@outputs_lib.refuses_holes
@functools.partial(
    jax.jit,
    static_argnames=("max_decode_len", "num_decodes", "coupled", "eos_id", "rescale_log_probs"),
)
def autoregressive_decode(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    rng: Key[Array, "*batch"] | Stream,
    settings: Sampling,
    *,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    num_decodes: int = 1,
    coupled: bool = False,
    eos_id: EndOfSequence = EOS_ID,
    rescale_log_probs: bool = True,
) -> Decoded:
    """Decodes with the target alone, in one compiled program.

    Args:
      target, inputs, prompts, rng, settings, max_decode_steps: as of ``speculative_decode``.
      max_decode_len, num_decodes, eos_id, rescale_log_probs: fields of ``Loop``.
      coupled: sample with the noise that the coupled verifier uses, which gives the
        text that it gives (and T5X's, with T5X's stream).

    Raises:
      InputError: prompts longer than ``max_decode_len``, or T5X's stream without
        ``coupled``.
    """
    decoded = speculative.speculative_decode(
        target,
        NoDraft(target.vocab_size),
        inputs,
        prompts,
        rng,
        settings,
        gamma=0,
        max_decode_len=max_decode_len,
        max_decode_steps=max_decode_steps,
        num_decodes=num_decodes,
        verifier=CoupledVerifier() if coupled else DEFAULT_VERIFIER,
        eos_id=eos_id,
        rescale_log_probs=rescale_log_probs,
    )
    return decoded.replace(stats=None)
