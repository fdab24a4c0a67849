"""Acceptance rates: how often a target accepts its drafts, by Corollary 3.6 and in decoding.

As in section 4.2 of the paper, the target generates tokens, 10,000 by default, and alpha is the
mean of ``sum min(p, q)`` over their positions, with p and q after standardization. All drafts
are scored in one pass over the target's distributions.

Decoding measures two more rates: the same mean over the positions that the loop verified, and
the share of verified drafts that were accepted. Two effects separate them from alpha. The loop
does not verify the position after a proposal that was accepted as a whole; such positions are
easier than others, and frequent where proposals are short (``copy``). And a draft that proposes
several tokens at once (Medusa's heads) is worse at the later ones; alpha is of the first.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spec_t5x.errors import InputError, as_lists, check_at_least
from spec_t5x.generation import Batch, GenerateOptions, Generation, Generator, all_answered
from spec_t5x.interfaces import Draft
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.text_scores import score_texts
from spec_t5x.theory import estimates
from spec_t5x.theory.estimates import Bootstrap, Estimate
from spec_t5x.theory.formulas import conditional_acceptance
from spec_t5x.types import PAD_ID, Int

# ``report(done, total, what)``: tokens.
Report = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceOptions:
    """What to measure."""

    # Names of the drafts, for the command; () takes the run's own draft.
    drafts: tuple = ()
    # Tokens that the target generates for each standardization. At temperature 0 every text
    # is generated once, and there may be fewer; sampling repeats the texts.
    num_tokens: int = 10_000
    # Each temperature with each of top_ks and each of top_ps (0 keeps all); without either, no
    # filter. Filters change nothing at temperature 0, which is measured once.
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
    # Of the intervals, bootstrapped over texts.
    confidence: float = 0.95
    # Texts that are also decoded speculatively, with each draft and lenience 1; 0 for none.
    decoded_texts: int = 64
    gamma: int = 7

    def __post_init__(self):
        as_lists(self, drafts=0, temperatures=1, top_ks=0, top_ps=0, leniences=1)
        if len(set(self.drafts)) < len(self.drafts):
            raise InputError(f"drafts are {', '.join(self.drafts)}: give each of them once")
        check_at_least(self, num_tokens=1, decoded_texts=0, gamma=1)
        self.bootstrap()
        # GenerateOptions checks the rest.
        for decoding in self.standardizations():
            for lenience in self.leniences:
                dataclasses.replace(decoding, lenience=lenience)

    def bootstrap(self) -> Bootstrap:
        """How intervals are made."""
        return Bootstrap(confidence=self.confidence, seed=int(self.seed))

    def standardizations(self) -> list[GenerateOptions]:
        """How the target generates, for each standardization."""
        filters = [(k, 0.0) for k in self.top_ks] + [(0, p) for p in self.top_ps]
        found = {}
        for temperature in self.temperatures:
            for top_k, top_p in filters or [(0, 0.0)]:
                options = GenerateOptions(
                    temperature=float(temperature),
                    # Filters do not change an argmax.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Achieved:
    """The acceptance that speculative decoding achieved, with intervals over texts."""

    num_texts: int
    target_calls: int
    # Generated tokens for each target call.
    block_efficiency: Estimate
    # Mean of beta over verified positions, as the loop counts it. None where nothing was
    # verified.
    alpha: Estimate | None
    # Accepted drafts over verified ones; None where nothing was verified.
    observed: Estimate | None
    # How often the i-th draft was accepted where it was verified.
    acceptance_by_position: list[float]


def achieved(
    outputs: Sequence[Generation],
    texts: Int[np.ndarray, "outputs"] | None = None,
    bootstrap: Bootstrap | None = None,
) -> Achieved:
    """The acceptance of outputs that were decoded with a draft.

    Args:
      outputs: at least one.
      texts: the number of the text that each output counts as in the bootstrap; None takes
        each output as a text of its own.
      bootstrap: how the intervals are made.
    """
    bootstrap = bootstrap or Bootstrap()
    texts = np.arange(len(outputs)) if texts is None else texts
    accepted, verified = (
        np.array([getattr(output, name) for output in outputs])
        for name in ("accepted_by_position", "verified_by_position")
    )
    # Rounding takes the alpha of a draft that equals the target above 1.
    alphas = np.array([min(output.alpha or 0.0, 1.0) for output in outputs])
    calls = np.array([output.target_calls for output in outputs])
    # Of all that was computed, be it beyond a stop string.
    lengths = np.array([round(o.block_efficiency * o.target_calls) for o in outputs])

    def ratio(sums: np.ndarray, counts: np.ndarray) -> Estimate | None:
        sums, counts = (np.bincount(texts, weights=each) for each in (sums, counts))
        return estimates.ratio(sums, counts.astype(np.int64), bootstrap)

    return Achieved(
        num_texts=len(outputs),
        target_calls=int(calls.sum()),
        block_efficiency=ratio(lengths, calls),
        alpha=ratio(alphas * verified.sum(axis=1), verified.sum(axis=1)),
        observed=ratio(accepted.sum(axis=1), verified.sum(axis=1)),
        acceptance_by_position=conditional_acceptance(
            accepted.sum(axis=0), verified.sum(axis=0)
        ).tolist(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceRow:
    """A draft's acceptance under one standardization and lenience."""

    draft: str
    temperature: float
    top_k: int
    top_p: float
    lenience: float
    # The mean of beta over the positions where the draft proposed; None where it never did.
    alpha: Estimate | None
    # Tokens of the target that were scored, and the sources that they came from (of one source
    # alone, the texts).
    num_tokens: int
    num_texts: int
    # Share of the tokens for which the draft proposed anything.
    share_proposed: float
    # What decoding achieved with ``gamma``, without lenience; None where nothing was decoded.
    gamma: int
    decoded: Achieved | None

    @property
    def sampling(self) -> str:
        """The standardization in words: "argmax", "T = 1, top-k 40"."""
        if self.temperature == 0:
            return "argmax"
        filters = {"top-k": self.top_k, "top-p": self.top_p}
        return ", ".join(
            [f"T = {self.temperature:g}", *(f"{n} {v:g}" for n, v in filters.items() if v)]
        )


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
      report: ``report(done, total, what)`` is called for every batch.

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
    rows = [row for decoding in options.standardizations() for row in measured.rows(decoding)]
    measured.report(measured.total, measured.total, "all measured")
    return rows


def table(rows: Sequence[AcceptanceRow]) -> results.Table:
    """The rows, with the intervals."""

    def efficiency(row: AcceptanceRow) -> str | None:
        decoded = row.decoded
        return decoded and f"{decoded.block_efficiency.value:.2f} (gamma {row.gamma})"

    return results.table(
        {
            "draft": lambda row: row.draft,
            "sampling": lambda row: row.sampling,
            "lenience": lambda row: f"{row.lenience:g}",
            "alpha¹": lambda row: cell(row.alpha),
            "proposed²": lambda row: f"{row.share_proposed:.0%}",
            "tokens": lambda row: row.num_tokens,
            "in the loop³": lambda row: row.decoded and cell(row.decoded.alpha),
            "observed⁴": lambda row: row.decoded and cell(row.decoded.observed),
            "block efficiency": efficiency,
        },
        rows,
        "¹ E[sum min(p, q)] over tokens that the target generated (Corollary 3.6), with an "
        "interval bootstrapped over texts. ² Share of the tokens for which the draft proposed "
        "anything; alpha is over these. ³ The same mean over the positions that speculative "
        "decoding verified. ⁴ Share of the verified drafts that were accepted.",
    )


def best(rows: Sequence[AcceptanceRow]) -> str | None:
    """The closing sentence: the exact draft that brings most tokens a target call.

    None where no row without lenience was decoded.
    """
    exact = [row for row in rows if row.lenience == 1 and row.decoded]
    if not exact:
        return None
    row = max(exact, key=lambda row: row.decoded.block_efficiency.value)
    efficiency = cell(row.decoded.block_efficiency, digits=2)
    return f"Best: {row.draft} at {row.sampling}, {efficiency} tokens a target call."


def cell(estimate: Estimate | None, digits: int = 3) -> str | None:
    """The value and, where there is one, its interval."""
    if estimate is None or estimate.low is None:
        return estimate and f"{estimate.value:.{digits}f}"
    value, low, high = (
        f"{each:.{digits}f}" for each in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} ({low}-{high})"


class _Measurement:
    """One call of ``measure``."""

    def __init__(self, generator: Generator, drafts, texts, options: AcceptanceOptions, report):
        self.generator, self.drafts, self.texts = generator, drafts, texts
        self.options, self.report = options, report or (lambda done, total, what: None)
        self.widths = _widths(generator, texts, options.standardizations()[0])
        # Tokens, of the standardizations that are over and of all.
        self.done, self.total = 0, len(options.standardizations()) * options.num_tokens

    def rows(self, decoding: GenerateOptions) -> Iterator[AcceptanceRow]:
        """Of one standardization."""
        scored, num_used = self._score(decoding)
        # At temperature 0 the texts may have run out.
        self.done += self.options.num_tokens
        for name in self.drafts:
            for index, lenience in enumerate(self.options.leniences):
                decoded = None
                if self.options.decoded_texts and lenience == 1:
                    decoded = self._decode(name, decoding, num_used)
                yield self._row(name, index, lenience, decoding, scored, decoded)

    def _score(self, decoding: GenerateOptions) -> tuple[dict[str, Any], int]:
        """Scores all drafts while the target generates.

        Returns:
          The scores of all tokens, one after the other: ``texts``, the number of the text that a
          token is in; by draft ``betas`` [leniences, tokens] and ``proposed``, whether it
          proposed anything. And how many texts were generated.
        """
        wanted, parts, num_tokens, num_used = self.options.num_tokens, [], 0, 0
        for batch in self._batches(decoding, first=0):
            scores = score_texts(
                self.generator.target,
                self.drafts,
                batch.tokens,
                batch.prompts,
                batch.keys,
                self.generator.sampling(decoding),
                max_decode_len=self.generator.longest(batch, decoding),
                max_decode_steps=batch.max_decode_steps,
                leniences=self.options.leniences,
                eos_id=self.generator.eos_id,
            )
            scores = jax.device_get(scores)
            at = np.nonzero(scores.written)
            part = {
                "texts": self._clusters(num_used, len(batch.texts))[at[0]],
                "betas": {
                    name: betas[:, *at].astype(np.float64) for name, betas in scores.betas.items()
                },
                "proposed": {name: proposed[at] for name, proposed in scores.proposed.items()},
            }
            parts.append(part)
            num_used += len(batch.texts)
            num_tokens += len(part["texts"])
            self._tell(min(num_tokens, wanted), decoding, "scoring")
            if num_tokens >= wanted:
                break
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, -1)[..., :wanted], *parts)
        return joined, num_used

    def _decode(self, name: str, decoding: GenerateOptions, first: int) -> Achieved:
        """Speculative decoding of the first texts, with other random keys than before."""
        self._tell(0, decoding, f"decoding with {name}")
        generator, outputs = self.generator.with_draft(self.drafts[name]), []
        for batch in self._batches(decoding, first, limit=self.options.decoded_texts):
            decoded = generator.decode(batch, decoding)
            answers = all_answered(generator.collect(batch, decoded, decoding))
            outputs += [output for (output,) in answers]
        texts = self._clusters(first, len(outputs))
        return achieved(outputs, texts, self.options.bootstrap())

    def _clusters(self, first: int, count: int) -> np.ndarray:
        """The bootstrap's number of each of ``count`` texts from place ``first`` on.

        Draws from one source depend on one another, as tokens of a text do: the source is
        resampled. Where there is only one, such as the empty prompt, the draws are.
        """
        places = first + np.arange(count)
        return places % len(self.texts) if len(self.texts) > 1 else places

    def _batches(
        self, decoding: GenerateOptions, first: int, limit: int | None = None
    ) -> Iterator[Batch]:
        """Batches of the texts, repeated; once at temperature 0, or up to ``limit``.

        The random key of a text follows from its place, counted from ``first``.
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

    def _row(self, name, index, lenience, decoding, scored, decoded) -> AcceptanceRow:
        there, bootstrap = scored["proposed"][name], self.options.bootstrap()
        betas, texts = scored["betas"][name][index][there], scored["texts"][there]
        return AcceptanceRow(
            draft=name,
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            lenience=float(lenience),
            alpha=estimates.mean(betas, texts, bootstrap),
            num_tokens=there.size,
            num_texts=len(np.unique(scored["texts"])),
            share_proposed=float(there.mean()),
            gamma=self.options.gamma,
            decoded=decoded,
        )

    def _tell(self, tokens: int, decoding: GenerateOptions, what: str) -> None:
        what = f"temperature {decoding.temperature:g}: {what}"
        self.report(self.done + tokens, self.total, what)


def _widths(generator: Generator, texts: Sequence[str], decoding: GenerateOptions):
    """Widths of the sources and of the prompts that fit all batches: one program serves all.

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
