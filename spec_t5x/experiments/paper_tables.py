"""What the paper measured: Leviathan, Kalman and Matias (ICML 2023), as data."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """A row of Table 2 (with c from Table 4): T5-XXL on one TPU-v4, batch 1."""

    # "EnDe" (WMT English-German) or "CNN/DM" (CNN/DailyMail).
    task: str
    # Which T5 1.1 drafted: "small", "base" or "large".
    draft: str
    temperature: float
    gamma: int
    # Measured acceptance rate.
    alpha: float
    # Measured time of a draft step, in target steps.
    c: float
    # Speed-up that Theorem 3.8 predicts from these, and the one measured.
    expected: float
    measured: float


def _row(task, draft, temperature, gamma, alpha, c, expected, measured) -> SpeedUp:
    return SpeedUp(
        task=task,
        draft=draft,
        temperature=float(temperature),
        gamma=gamma,
        alpha=alpha,
        c=c,
        expected=expected,
        measured=measured,
    )


TABLE_2 = (
    _row("EnDe", "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    _row("EnDe", "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    _row("EnDe", "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    _row("EnDe", "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    _row("EnDe", "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    _row("EnDe", "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    _row("CNN/DM", "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    _row("CNN/DM", "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    _row("CNN/DM", "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    _row("CNN/DM", "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    _row("CNN/DM", "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    _row("CNN/DM", "large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)

# The paper's models, by the names of ``models.sizes``.
TARGET = "t5_1_1_xxl"
DRAFTS = {name: f"t5_1_1_{name}" for name in ("small", "base", "large")}
