"""c and T(m) of a pair on this device, the latter kept for the rest of the process."""

from spec_t5x.experiments.reproduction import pairs
from spec_t5x.experiments.reproduction.pairs import Pair

# By target, shape and widths: the parts of a run ask for the same again and again.
_COSTS: dict[tuple, list[float]] = {}


def verification_costs(pair: Pair, text: str, options, widths: tuple[int, ...]) -> list[float]:
    """T(m) for m = 1, 2, … up to the largest of ``widths``, in steps of the target.

    Args:
      pair: whose target.
      text: a source, of the length that is decoded.
      options: ``GenerateOptions``: lengths.
      widths: the m that are measured; between them T is interpolated.
    """
    import jax.numpy as jnp
    import numpy as np

    from spec_t5x.tuning.step_times import measure_verification_costs

    generator = pairs.load_target(pair)
    (batch,) = generator.batches([text], options)
    key = (pair.target, batch.tokens.shape, batch.prompts.shape, options.max_decode_len, widths)
    if key not in _COSTS:
        measured = measure_verification_costs(
            generator.target,
            jnp.asarray(batch.tokens),
            widths=widths,
            max_decode_len=options.max_decode_len,
        )
        every = np.arange(1, max(widths) + 1)
        _COSTS[key] = np.interp(every, widths, measured).tolist()
    return _COSTS[key]


def draft_cost(pair: Pair, draft: str, text: str, options) -> float:
    """c: the time of a draft step in steps of the target (Definition 3.7).

    Args:
      pair, draft: as of ``pairs.load_draft``.
      text: a source, of the length that is decoded.
      options: ``GenerateOptions``: lengths, gamma, temperature.
    """
    import jax.numpy as jnp

    from spec_t5x.tuning.step_times import measure_step_times

    generator = pairs.load_target(pair)
    (batch,) = generator.batches([text], options)
    return measure_step_times(
        generator.target,
        pairs.load_draft(pair, draft),
        jnp.asarray(batch.tokens),
        gamma=options.gamma,
        max_decode_len=options.max_decode_len,
        settings=options.sampling(),
        verifier=options.make_verifier(),
        repeats=5,
    ).c
