"""Acceptance rates: how often a target accepts its drafts, by Corollary 3.6 and in decoding.

As section 4.2 of the paper has it: the target generates tokens, 10,000 by default, and alpha
is the mean of ``sum min(p, q)`` over their places, with p and q after the standardization
that is asked for. All drafts are scored in one pass over the target's distributions.

Beside it stands what decoding achieves: the same statistic as the loop keeps it, and how
many of the verified drafts were accepted. Two things may tell these apart from alpha. A loop
verifies nothing at the place after a whole proposal was accepted, where the target's own
token comes for free; such places are easier than others. With gamma drafts in each proposal
that is seldom, with the short proposals of a draft that copies it is not. And a draft that
proposes several tokens without looking back (Medusa's heads) does worse at the later ones,
where alpha is of the first.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.experiments.text_scores import score_texts
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.interfaces import Draft
from spec_t5x.theory import estimates
from spec_t5x.theory.estimates import Bootstrap, Estimate, PositionBin
from spec_t5x.theory.formulas import conditional_acceptance
from spec_t5x.types import PAD_ID

# ``report(done, total, what)``: how many tokens and texts of all.
Report = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceOptions:
    """What to measure."""

    # Tokens that the target generates, for each standardization. At temperature 0 every
    # text is generated once, and there may be fewer; sampling goes round the texts.
    num_tokens: int = 10_000
    # Standardizations: each temperature with each of top_ks and each of top_ps (0 keeps
    # all); without either, no filter. Filters change nothing at temperature 0, which is
    # measured once.
    temperatures: tuple = (0.0, 1.0)
    top_ks: tuple = ()
    top_ps: tuple = ()
    # l of section A.5; 1 is Algorithm 1.
    leniences: tuple = (1.0,)
    seed: int = 0
    batch_size: int = 16
    # Tokens generated at most for each text.
    max_decode_len: int = 128
    # Cut longer sources instead of refusing them.
    truncate: bool = False
    # Of the intervals: bootstrapped over texts.
    confidence: float = 0.95
    resamples: int = 1000
    # Texts that are also decoded speculatively, with each draft; 0 for none.
    decoded_texts: int = 64
    gamma: int = 7
    # Decode at leniences below 1 too, each with a program of its own.
    decode_leniently: bool = False

    def __post_init__(self):
        for name in ("temperatures", "top_ks", "top_ps", "leniences"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise InputError(f"{name} is {value!r}: give a list, as in ({value!r},)")
            # gin's sequences.
            object.__setattr__(self, name, tuple(value))
        for name in ("temperatures", "leniences"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty: give at least one")
        for name, least in (("num_tokens", 1), ("decoded_texts", 0), ("gamma", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}: give a whole number of at least {least}")
        self.bootstrap()
        # What remains is checked by those whose it is.
        for decoding in self.standardizations():
            for lenience in self.leniences:
                dataclasses.replace(decoding, lenience=lenience)

    def bootstrap(self) -> Bootstrap:
        """How intervals are made."""
        return Bootstrap(confidence=self.confidence, resamples=self.resamples, seed=int(self.seed))

    def standardizations(self) -> list[GenerateOptions]:
        """How the target generates, for each distribution to sample from."""
        filters = [(k, 0.0) for k in self.top_ks] + [(0, p) for p in self.top_ps]
        found = {}
        for temperature in self.temperatures:
            for top_k, top_p in filters or [(0, 0.0)]:
                options = GenerateOptions(
                    temperature=float(temperature),
                    # An argmax is what it is, whatever is left out.
                    top_k=top_k if temperature else 0,
                    top_p=float(top_p) if temperature else 0.0,
                    seed=self.seed,
                    batch_size=self.batch_size,
                    max_decode_len=self.max_decode_len,
                    truncate=self.truncate,
                    gamma=self.gamma,
                    verifier="token",
                )
                if options.sampling().greedy:
                    options = dataclasses.replace(options, temperature=0.0, top_k=0, top_p=0.0)
                found[options] = None
        return list(found)

    def decoded_leniences(self) -> tuple[float, ...]:
        """Leniences that texts are decoded with."""
        return tuple(each for each in self.leniences if each == 1 or self.decode_leniently)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Achieved:
    """What speculative decoding with the token verifier made of a draft."""

    gamma: int
    num_texts: int
    target_calls: int
    # Generated tokens for each of these calls.
    block_efficiency: float
    # Mean of beta over verified places, as the loop keeps it. None where nothing was
    # verified, and at temperature 0 with a lenience, which the loop's statistic leaves out.
    alpha: Estimate | None
    # Accepted drafts over verified ones; None where nothing was verified.
    observed: Estimate | None
    # How often the i-th draft was accepted where it was verified.
    acceptance_by_position: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceRow:
    """A draft's acceptance under one standardization and lenience."""

    draft: str
    temperature: float
    top_k: int
    top_p: float
    lenience: float
    # The mean of beta over the places where the draft proposed; None where it never did.
    alpha: Estimate | None
    # Tokens that the target generated and that were looked at, and the sources that they
    # came of (of one source alone, the texts).
    num_tokens: int
    num_texts: int
    # Share of the tokens for which the draft proposed anything.
    share_proposed: float
    # By position in the text.
    by_position: list[PositionBin]
    # None where nothing was decoded.
    decoded: Achieved | None

    @property
    def d_lk(self) -> float | None:
        """The mean of D_LK(p, q) = 1 - beta (Theorem 3.5); None with a lenience."""
        return 1 - self.alpha.value if self.alpha and self.lenience == 1 else None

    @property
    def sampling(self) -> str:
        """The standardization in words: "argmax", "T = 1, top-k 40"."""
        if self.temperature == 0:
            return "argmax"
        filters = {"top-k": self.top_k, "top-p": self.top_p}
        return ", ".join(
            [f"T = {self.temperature:g}", *(f"{n} {v:g}" for n, v in filters.items() if v)]
        )

    def to_dict(self) -> dict:
        """All of it as JSON can hold it."""
        return dataclasses.asdict(self) | {"d_lk": self.d_lk}


def measure(
    generator: Generator,
    drafts: Mapping[str, Draft],
    texts: Sequence[str],
    options: AcceptanceOptions | None = None,
    report: Report | None = None,
) -> list[AcceptanceRow]:
    """The acceptance rate of every draft under every standardization and lenience.

    Args:
      generator: the target; its own draft is not looked at.
      drafts: by the names that the rows are to have.
      texts: what the target generates from.
      options: what to measure.
      report: ``report(done, total, what)`` is told of every batch.

    Returns:
      Rows by standardization, then draft, then lenience.

    Raises:
      InputError: no draft or no text, a text that the target does not take, or a draft
        that does not go with the target.
    """
    options = options or AcceptanceOptions()
    if not drafts:
        raise InputError("no draft to measure: give at least one")
    if not texts:
        raise InputError("no text to generate from: give at least one")
    measured = _Measurement(generator.plain(), dict(drafts), list(texts), options, report)
    return [row for decoding in options.standardizations() for row in measured.rows(decoding)]


def table(rows: Sequence[AcceptanceRow]) -> str:
    """The rows as a Markdown table, with the intervals."""
    lines = [
        "| draft | sampling | lenience | alpha¹ | D_LK | proposed² | tokens | in the loop³ "
        "| observed⁴ | block efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        decoded = row.decoded
        d_lk = "—" if row.d_lk is None else f"{row.d_lk:.3f}"
        achieved = ("—", "—", "—")
        if decoded:
            efficiency = f"{decoded.block_efficiency:.2f} (gamma {decoded.gamma})"
            achieved = (_cell(decoded.alpha), _cell(decoded.observed), efficiency)
        lines.append(
            f"| {row.draft} | {row.sampling} | {row.lenience:g} | {_cell(row.alpha)} | {d_lk} "
            f"| {row.share_proposed:.0%} | {row.num_tokens} | {' | '.join(achieved)} |"
        )
    lines += [
        "",
        "¹ E[sum min(p, q)] over tokens that the target generated (Corollary 3.6), with an "
        "interval bootstrapped over texts. ² Share of the tokens for which the draft proposed "
        "anything; alpha is over these. ³ The same mean over the places that speculative "
        "decoding verified. ⁴ Drafts accepted there.",
    ]
    return "\n".join(lines)


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "—"
    if estimate.low is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f}-{estimate.high:.3f})"


@dataclasses.dataclass(frozen=True)
class _Scored:
    """Places of generated texts, one number for each generated token."""

    texts: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    # By draft: betas [leniences, places] and whether anything was proposed [places].
    betas: dict[str, np.ndarray]
    proposed: dict[str, np.ndarray]

    def first(self, num: int) -> "_Scored":
        """The first so many places."""
        return jax.tree.map(lambda leaf: leaf[..., :num], self)


jax.tree_util.register_dataclass(
    _Scored, data_fields=["texts", "positions", "tokens", "betas", "proposed"], meta_fields=[]
)


class _Measurement:
    """One call of ``measure``."""

    def __init__(self, generator: Generator, drafts, texts, options: AcceptanceOptions, report):
        self.generator, self.drafts, self.texts = generator, drafts, texts
        self.options, self.report = options, report or (lambda done, total, what: None)
        self.widths = _widths(generator, texts, options.standardizations()[0])
        decodings = len(drafts) * len(options.decoded_leniences()) * options.decoded_texts
        self.total = len(options.standardizations()) * (options.num_tokens + decodings)
        self.done = 0

    def rows(self, decoding: GenerateOptions) -> Iterator[AcceptanceRow]:
        """Of one standardization."""
        scored, places_used = self._score(decoding)
        for name in self.drafts:
            for index, lenience in enumerate(self.options.leniences):
                decoded = None
                if self.options.decoded_texts and lenience in self.options.decoded_leniences():
                    lenient = dataclasses.replace(decoding, lenience=lenience)
                    decoded = self._decode(name, lenient, places_used)
                yield self._row(name, index, lenience, decoding, scored, decoded)

    def _score(self, decoding: GenerateOptions) -> tuple[_Scored, int]:
        """Generates with the target and scores all drafts; how many texts it took, too."""
        goal, parts, num, used = self.done + self.options.num_tokens, [], 0, 0
        for batch in self._batches(decoding, first=0):
            decoded = self.generator.decode(batch, decoding)
            scores = score_texts(
                self.generator.target,
                self.drafts,
                batch.tokens,
                batch.prompts,
                decoded.tokens[:, 0],
                decoded.lengths[:, 0],
                batch.keys,
                decoding.sampling(),
                leniences=self.options.leniences,
            )
            sources = self._clusters(used, len(batch.texts))
            part = _places(batch, *jax.device_get((decoded, scores)), sources)
            parts.append(part)
            used += len(batch.texts)
            num += part.tokens.size
            self._tell(part.tokens.size, f"{self._what(decoding)}: scoring", goal)
            if num >= self.options.num_tokens:
                break
        # At temperature 0 the texts may have run out.
        self._tell(goal - self.done, f"{self._what(decoding)}: scored", goal)
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *parts)
        return joined.first(self.options.num_tokens), used

    def _decode(self, name: str, decoding: GenerateOptions, first: int) -> Achieved:
        """Speculative decoding of the first texts, with other random keys than before."""
        goal, rows, wanted = self.done + self.options.decoded_texts, [], self.options.decoded_texts
        generator = self.generator.with_draft(self.drafts[name])
        for batch in self._batches(decoding, first=first, limit=wanted):
            stats = jax.device_get(generator.decode(batch, decoding).stats)
            num = len(batch.texts)
            rows.append(jax.tree.map(lambda leaf, num=num: leaf[:num, 0], stats))
            self._tell(len(batch.texts), f"{self._what(decoding)}: decoding with {name}", goal)
        self._tell(goal - self.done, f"{self._what(decoding)}: decoded with {name}", goal)
        stats = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
        bootstrap, calls = self.options.bootstrap(), int(stats.target_calls.sum())
        clusters = self._clusters(first, len(stats.target_calls))
        betas, accepted, verified = (
            np.bincount(clusters, weights=values)
            for values in (stats.beta_sum, stats.accepted, stats.verified)
        )
        verified = verified.astype(np.int64)
        return Achieved(
            gamma=decoding.gamma,
            num_texts=len(stats.target_calls),
            target_calls=calls,
            block_efficiency=float(stats.appended.sum() / calls),
            alpha=estimates.ratio(betas, verified, bootstrap),
            observed=estimates.ratio(accepted, verified, bootstrap),
            acceptance_by_position=conditional_acceptance(
                stats.accepted_by_position.sum(axis=0), stats.verified_by_position.sum(axis=0)
            ).tolist(),
        )

    def _clusters(self, first: int, count: int) -> np.ndarray:
        """What ``count`` texts from place ``first`` on count as, for the intervals.

        Several draws from one source depend on one another, as tokens of a text do: what is
        drawn again is the source. Of one source alone, such as no text at all, the draws are
        what there is.
        """
        places = first + np.arange(count)
        return places % len(self.texts) if len(self.texts) > 1 else places

    def _batches(
        self, decoding: GenerateOptions, first: int, limit: int | None = None
    ) -> Iterator[Batch]:
        """Batches of the texts, round and round; once at temperature 0, or up to ``limit``.

        The random key of a text is that of its place, counted from ``first``.
        """
        if decoding.sampling().greedy:
            limit = min(limit or len(self.texts), len(self.texts))
        for start in itertools.count(0, decoding.batch_size):
            end = start + decoding.batch_size
            end = end if limit is None else min(end, limit)
            if start >= end:
                return
            texts = [self.texts[place % len(self.texts)] for place in range(start, end)]
            for batch in self.generator.batches(texts, decoding, first + start):
                yield _widened(batch, *self.widths)

    def _row(self, name, index, lenience, decoding, scored: _Scored, decoded) -> AcceptanceRow:
        there, bootstrap = scored.proposed[name], self.options.bootstrap()
        betas, texts = scored.betas[name][index][there], scored.texts[there]
        return AcceptanceRow(
            draft=name,
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            lenience=float(lenience),
            alpha=estimates.mean(betas, texts, bootstrap),
            num_tokens=scored.tokens.size,
            num_texts=len(np.unique(scored.texts)),
            share_proposed=float(there.mean()),
            by_position=estimates.by_position(betas, texts, scored.positions[there], bootstrap),
            decoded=decoded,
        )

    def _tell(self, more: int, what: str, at_most: int) -> None:
        self.done = min(self.done + more, at_most)
        self.report(self.done, self.total, what)

    def _what(self, decoding: GenerateOptions) -> str:
        return f"temperature {decoding.temperature:g}"


def _widths(generator: Generator, texts: Sequence[str], decoding: GenerateOptions):
    """Width of the sources and of the prompts, for all batches: one program serves all.

    Raises:
      InputError: a text that the target does not take.
    """
    longest = max(texts, key=lambda text: len(generator.tokenize(text, decoding)))
    (batch,) = generator.batches([longest], decoding)
    return batch.tokens.shape[1], batch.prompts.shape[1]


def _widened(batch: Batch, source: int, prompt: int) -> Batch:
    """The same with more padding."""

    def pad(tokens: np.ndarray, width: int) -> np.ndarray:
        missing = ((0, 0), (0, width - tokens.shape[1]))
        return np.pad(tokens, missing, constant_values=PAD_ID)

    return dataclasses.replace(
        batch, tokens=pad(batch.tokens, source), prompts=pad(batch.prompts, prompt)
    )


def _places(batch: Batch, decoded, scores, sources: np.ndarray) -> _Scored:
    """The generated tokens of a batch's real rows, one after the other."""
    rows = len(batch.texts)
    starts = (batch.prompts[:rows, 1:] != PAD_ID).sum(axis=1)
    counts = np.maximum(decoded.lengths[:rows, 0] - starts, 0)
    width = decoded.tokens.shape[2]
    # Scores are numbered from the first generated token, tokens from the prompt's first.
    generated = np.arange(width)[None, :] < counts[:, None]
    text, position = np.nonzero(generated)
    return _Scored(
        texts=sources[text],
        positions=position,
        tokens=decoded.tokens[text, 0, starts[text] + position],
        betas={name: of.betas[:, text, position].astype(np.float64) for name, of in scores.items()},
        proposed={name: of.proposed[text, position] for name, of in scores.items()},
    )
