"""Numbers that the paper prints, Leviathan, Kalman and Matias (ICML 2023), as data."""

import dataclasses
from decimal import Decimal


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Row of Table 1, where drafts cost nothing (c = 0)."""

    alpha: float
    gamma: int
    # Factors by which arithmetic operations and speed grow over plain decoding.
    operations: float
    speed: float


TABLE_1 = (
    TradeOff(0.6, 2, 1.53, 1.96),
    TradeOff(0.7, 3, 1.58, 2.53),
    TradeOff(0.8, 2, 1.23, 2.44),
    TradeOff(0.8, 5, 1.63, 3.69),
    TradeOff(0.9, 2, 1.11, 2.71),
    TradeOff(0.9, 10, 1.60, 6.86),
)


@dataclasses.dataclass(frozen=True)
class SpeedUp:
    """Row of Table 2 (with c from Table 4): T5-XXL on one TPU-v4, batch 1."""

    # "EnDe" (WMT English-German) or "CNN/DM" (CNN/DailyMail).
    task: str
    # The size of the T5 1.1 that drafted: "small", "base" or "large".
    draft: str
    temperature: float
    gamma: int
    # Measured acceptance rate.
    alpha: float
    # Measured time of a draft step, in target steps.
    c: float
    # Speed-up that Theorem 3.8 predicts (EXP), and the measured one (EMP).
    expected: float
    measured: float


TABLE_2 = (
    SpeedUp("EnDe", "small", 0.0, 7, 0.75, 0.02, 3.2, 3.4),
    SpeedUp("EnDe", "base", 0.0, 7, 0.80, 0.04, 3.3, 2.8),
    SpeedUp("EnDe", "large", 0.0, 7, 0.82, 0.11, 2.5, 1.7),
    SpeedUp("EnDe", "small", 1.0, 7, 0.62, 0.02, 2.3, 2.6),
    SpeedUp("EnDe", "base", 1.0, 5, 0.68, 0.04, 2.4, 2.4),
    SpeedUp("EnDe", "large", 1.0, 3, 0.71, 0.11, 2.0, 1.4),
    SpeedUp("CNN/DM", "small", 0.0, 5, 0.65, 0.02, 2.4, 3.1),
    SpeedUp("CNN/DM", "base", 0.0, 5, 0.73, 0.04, 2.6, 3.0),
    SpeedUp("CNN/DM", "large", 0.0, 3, 0.74, 0.11, 2.0, 2.2),
    SpeedUp("CNN/DM", "small", 1.0, 5, 0.53, 0.02, 1.9, 2.3),
    SpeedUp("CNN/DM", "base", 1.0, 3, 0.55, 0.04, 1.8, 2.2),
    SpeedUp("CNN/DM", "large", 1.0, 3, 0.56, 0.11, 1.6, 1.7),
)

# The paper's models, by the names of ``models.sizes``.
TARGET = "t5_1_1_xxl"
DRAFTS = {name: f"t5_1_1_{name}" for name in ("small", "base", "large")}


@dataclasses.dataclass(frozen=True)
class AcceptanceRate:
    """Row of Table 3: alpha on 10,000 tokens that the target generated."""

    # "GPT-like (97M)", "T5-XXL (EnDe)", "T5-XXL (CNN/DM)" or "LaMDA (137B)".
    target: str
    draft: str
    temperature: float
    alpha: float


# Alphas at temperature 0 and at 1, by target and draft. LaMDA's distributions are always filtered
# by top-k 40.
_RATES = {
    "GPT-like (97M)": {
        "unigram": (0.03, 0.03),
        "bigram": (0.05, 0.05),
        "GPT-like (6M)": (0.88, 0.89),
    },
    "T5-XXL (EnDe)": {
        "unigram": (0.08, 0.07),
        "bigram": (0.20, 0.19),
        "T5-small": (0.75, 0.62),
        "T5-base": (0.80, 0.68),
        "T5-large": (0.82, 0.71),
    },
    "T5-XXL (CNN/DM)": {
        "unigram": (0.13, 0.08),
        "bigram": (0.23, 0.16),
        "T5-small": (0.65, 0.53),
        "T5-base": (0.73, 0.55),
        "T5-large": (0.74, 0.56),
    },
    "LaMDA (137B)": {
        "LaMDA (100M)": (0.61, 0.57),
        "LaMDA (2B)": (0.71, 0.71),
        "LaMDA (8B)": (0.75, 0.74),
    },
}
TABLE_3 = tuple(
    AcceptanceRate(target, draft, float(temperature), alphas[temperature])
    for target, drafts in _RATES.items()
    for temperature in (0, 1)
    for draft, alphas in drafts.items()
)


@dataclasses.dataclass(frozen=True)
class Lenient:
    """Alpha under lenience, T5-XXL on EnDe: a cell of Table 5, or from the text of section A.5."""

    draft: str
    lenience: float
    alpha: float
    # Speed-up that section A.5 derives from alpha, with the digits printed; None if none.
    speed_up: Decimal | None = None


# Leniences of Table 5 and, at temperature 0, of section A.5.
LENIENCES = (1.0, 0.5, 0.3, 0.1)


def _lenient(draft: str, alphas: tuple[float, ...], speed_ups: str = "") -> tuple[Lenient, ...]:
    factors = map(Decimal, speed_ups.split()) if speed_ups else (None,) * len(LENIENCES)
    return tuple(map(Lenient, (draft,) * len(LENIENCES), LENIENCES, alphas, factors))


TABLE_5 = (
    *_lenient("unigram", (0.07, 0.10, 0.11, 0.16)),
    *_lenient("bigram", (0.19, 0.23, 0.25, 0.32)),
    *_lenient("T5-small", (0.62, 0.71, 0.76, 0.84), "2.5 3.1 3.6 5"),
    *_lenient("T5-base", (0.68, 0.80, 0.83, 0.90)),
)

# Temperature 0 (section A.5): a draft x is kept if p(x) >= l max(p). Table 5 is temperature 1.
ARGMAX_LENIENCE = _lenient("T5-small", (0.75, 0.75, 0.80, 0.87), "3.3 3.3 3.9 4.9")
# The c of the speed-ups in both; the paper prints no gamma for those of Table 5.
LENIENCE_C = 0.015
ARGMAX_LENIENCE_GAMMA = 8

# Sections 3.6 and 4.2: speed-up of Table 3's bigram draft for T5-XXL on EnDe, with c = 0.
BIGRAM_GAMMA = 3
BIGRAM_SPEED_UP = Decimal("1.25")
# Section 3.5: an oracle for gamma over a fixed gamma, "up to ~60% higher".
ORACLE_OVER_FIXED = Decimal("1.6")
