"""Measurements made up from costs that are known."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spec_t5x.decoding import call_widths
from spec_t5x.tuning.measuring import BatchTimes, DraftTimes, Measurement
from spec_t5x.tuning.traces import ENDED, Row, Trace, groups_of
from spec_t5x.verifiers import BlockVerifier

LARGEST = 15
WIDTHS = (1, 2, 3, 5, 9, 16)
PROBES = (2, 6)
GAMMAS = (1, *PROBES, LARGEST)


def rows_of(texts: Sequence[str], proposed: Sequence[Sequence[int]] | None = None) -> list:
    """Rows from flags: 1 where the draft is right, 0 where it is wrong."""
    return [
        [
            Row(
                accepted=np.asarray([float(flag) for flag in text]),
                proposed=np.asarray(proposed[n] if proposed else [LARGEST] * len(text)),
            )
        ]
        for n, text in enumerate(texts)
    ]


def random_texts(alpha: float, num: int = 40, length: int = 200, seed: int = 0) -> list[str]:
    """Texts in which each draft is right by chance."""
    right = np.random.default_rng(seed).random((num, length)) < alpha
    return ["".join("1" if flag else "0" for flag in row) for row in right]


def made_up(
    drafts: Mapping[str, tuple[Sequence, float]],
    *,
    batch_sizes: Sequence[int] = (1,),
    target: Callable[[int], float] = lambda width: 1.0,
    setup: float = 0.0,
    draft_setup: float = 0.0,
    overhead: float = 0.0,
    noise: float = 0.0,
    varying: Sequence[str] = (),
    rounds: int = 5,
) -> Measurement:
    """What a machine with these costs would show, in seconds.

    Args:
      drafts: by name, rows (``rows_of``) and seconds of a draft step.
      target: seconds of a call over so many tokens.
      setup, draft_setup: of a batch before its first token, plainly and more with a draft.
      overhead: of an iteration, for each of its drafts.
      noise: relative, of each timing.
    """
    rng = np.random.default_rng(7)
    traces = {name: Trace(rows=rows, gamma=LARGEST) for name, (rows, _) in drafts.items()}

    def seen(value) -> np.ndarray:
        value = np.asarray(value, np.float64)
        return value * (1 + noise * rng.standard_normal((rounds, *value.shape)))

    def verification(name, gamma, count):
        width = gamma + 1
        if name in varying:
            width = min(width for width in call_widths(width) if width > count)
        return target(width)

    def loop(name, step, gamma, groups) -> tuple[float, int]:
        """Seconds of all iterations of the batches, and how many these are."""
        proposed = traces[name].counts().of_batches(gamma, groups)
        counts = proposed[proposed != ENDED].tolist()
        each = gamma * (step + overhead)
        return sum(each + verification(name, gamma, count) for count in counts), len(counts)

    times = {}
    for size in batch_sizes:
        groups = groups_of(len(next(iter(traces.values())).rows), size)
        places = tuple(tuple(int(n) for n in group if n >= 0) for group in groups)
        steps = int(next(iter(traces.values())).counts().steps(groups).sum())
        of_drafts = {}
        for name, (_, step) in drafts.items():
            loops = [loop(name, step, gamma, groups) for gamma in PROBES]
            before = len(groups) * (setup + draft_setup)
            of_drafts[name] = DraftTimes(
                gammas=GAMMAS,
                propose=seen([gamma * step for gamma in GAMMAS]),
                probes=PROBES,
                decode=seen([seconds + before for seconds, _ in loops]),
                setup=seen([before] * len(PROBES)),
                iterations=np.asarray([num for _, num in loops]),
            )
        times[size] = BatchTimes(
            batch_size=size,
            widths=WIDTHS,
            target=seen([target(width) for width in WIDTHS]),
            inputs=places,
            plain=seen(steps * target(1) + len(groups) * setup),
            plain_setup=seen(len(groups) * setup),
            steps=steps,
            drafts=of_drafts,
            compile_seconds=0.0,
        )
    return Measurement(
        times=times, traces=traces, varying=frozenset(varying), verifier=BlockVerifier()
    )
