"""Acceptance rates of drafts: alpha by Corollary 3.6, and the rates that decoding achieves.

As in section 4.2 of the paper, the target generates tokens, 10,000 by default, and alpha is the
mean of ``sum min(p, q)`` over their positions, with p and q after standardization. All drafts
are scored in one pass over the target's distributions.

Decoding measures two more rates: the mean of the same sum over the positions that the loop
verified, and the share of verified drafts that were accepted. The loop verifies no draft after a
proposal that was accepted as a whole, where drafts are right more often. A draft that proposes
several tokens at once (Medusa's heads) errs more at the later ones; alpha counts the first alone.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.interfaces import Draft
from spec_t5x.labs import estimates
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.achieved import Achieved, achieved
from spec_t5x.labs.benchmark.options import AcceptanceOptions
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.labs.benchmark.text_scores import score_texts
from spec_t5x.labs.estimates import Estimate
from spec_t5x.types import PAD_ID

# ``report(done, total, what)``: the tokens scored so far and in all, and the current work.
Report = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceRow:
    """Acceptance of a draft under one standardization and lenience."""

    draft: str
    temperature: float
    top_k: int
    top_p: float
    lenience: float
    # Mean of beta over the positions at which the draft proposed a token; None without any.
    alpha: Estimate | None
    # Tokens of the target that were scored, and the number of sources that they came from; with
    # a single source, the number of texts generated from it.
    num_tokens: int
    num_texts: int
    # Share of these tokens at which the draft proposed a token.
    share_proposed: float
    # Acceptance in decoding with ``gamma``; None below lenience 1, or if nothing was decoded.
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
    report: Report = lambda done, total, what: None,
) -> list[AcceptanceRow]:
    """Measures the acceptance rate of every draft under every standardization and lenience.

    Args:
      generator: the target; its own draft is not used.
      drafts: the drafts, by the names that their rows get.
      texts: the target's inputs.
      options: settings of the measurement; None for the defaults.
      report: called as ``Report`` describes, after every batch and before every decoding.

    Returns:
      Rows by standardization, then draft, then lenience.

    Raises:
      InputError: no draft or no text, a text that the target does not take, or a draft
        that does not fit the target.
    """
    options = options or AcceptanceOptions()
    if not drafts:
        raise InputError("no draft to measure: give at least one")
    if not texts:
        raise InputError("no text to generate from: give at least one")
    decodings, rows = options.standardizations(), []
    repeated, total = _Repeated(generator.plain(), texts, decodings[0]), options.num_tokens
    for number, decoding in enumerate(decodings):

        def tell(tokens: int, what: str, number=number, decoding=decoding) -> None:
            what = f"temperature {decoding.temperature:g}: {what}"
            report(number * total + tokens, len(decodings) * total, what)

        scores, num_used = _score(repeated, drafts, decoding, options, tell)
        for name, draft in drafts.items():
            decoded = None
            if options.decoded_texts and 1 in options.leniences:
                tell(total, f"decoding with {name}")
                decoded = _decode(repeated, draft, decoding, options, num_used)
            proposed, numbers = scores["proposed"][name], scores["texts"]
            for lenience, betas in zip(options.leniences, scores["betas"][name], strict=True):
                row = AcceptanceRow(
                    draft=name,
                    temperature=decoding.temperature,
                    top_k=decoding.top_k,
                    top_p=decoding.top_p,
                    lenience=float(lenience),
                    alpha=estimates.mean(betas[proposed], numbers[proposed], options.bootstrap()),
                    num_tokens=proposed.size,
                    num_texts=len(np.unique(numbers)),
                    share_proposed=float(proposed.mean()),
                    gamma=options.gamma,
                    decoded=decoded if lenience == 1 else None,
                )
                rows.append(row)
    report(len(decodings) * total, len(decodings) * total, "all measured")
    return rows


class _Repeated:
    """Texts that a target generates from repeatedly, in batches of one width."""

    def __init__(self, generator: Generator, texts: Sequence[str], decoding: GenerateOptions):
        self.generator, self.texts = generator, list(texts)
        # Batches are padded to the longest text, so that one program serves all of them.
        longest = max(texts, key=lambda text: len(generator.tokenize(text, decoding)))
        (self._widest,) = text_batches(generator, [longest], decoding)

    def batches(
        self, decoding: GenerateOptions, first: int, limit: int | None = None
    ) -> Iterator[Batch]:
        """Yields batches of ``limit`` texts in all, repeating the texts; without end if None.

        At temperature 0 each text comes once. The i-th text has the key of place ``first + i``.
        """
        if decoding.sampling().greedy:
            limit = min(limit or len(self.texts), len(self.texts))
        for start in itertools.count(0, decoding.batch_size):
            end = min(start + decoding.batch_size, limit or np.inf)
            if start >= end:
                return
            texts = [self.texts[place % len(self.texts)] for place in range(start, end)]
            for batch in text_batches(self.generator, texts, decoding, first + start):
                yield dataclasses.replace(
                    batch,
                    tokens=_widened(batch.tokens, self._widest.tokens),
                    prompts=_widened(batch.prompts, self._widest.prompts),
                )

    def numbers(self, first: int, count: int) -> np.ndarray:
        """Returns the unit of the bootstrap for each of ``count`` texts from place ``first`` on.

        Outputs of one source depend on one another, as tokens of a text do, so that the source is
        the unit. If there is only one source, for example an empty prompt, each output is a unit.
        """
        places = first + np.arange(count)
        return places % len(self.texts) if len(self.texts) > 1 else places


def _widened(ids: np.ndarray, widest: np.ndarray) -> np.ndarray:
    missing = widest.shape[1] - ids.shape[1]
    return np.pad(ids, ((0, 0), (0, missing)), constant_values=PAD_ID)


def _score(
    repeated: _Repeated,
    drafts: Mapping[str, Draft],
    decoding: GenerateOptions,
    options: AcceptanceOptions,
    tell: Callable[[int, str], None],
) -> tuple[dict[str, Any], int]:
    """Scores all drafts on the tokens that the target generates, ``options.num_tokens`` at most.

    Returns scores (``texts`` [tokens], each token's unit of the bootstrap; by draft ``betas``
    [leniences, tokens] and ``proposed`` [tokens], true where it proposed), and the texts' number.
    """
    generator, wanted, parts, num_used = repeated.generator, options.num_tokens, [], 0
    for batch in repeated.batches(decoding, first=0):
        scores = score_texts(
            generator.target,
            dict(drafts),
            batch.tokens,
            batch.prompts,
            batch.keys,
            generator.sampling(decoding),
            max_decode_len=generator.longest(batch, decoding),
            max_decode_steps=batch.max_decode_steps,
            leniences=options.leniences,
            eos_id=generator.vocabulary.eos_ids,
        )
        scores = jax.device_get(scores)
        at = np.nonzero(scores.written)
        parts.append(
            {
                "texts": repeated.numbers(num_used, len(batch.texts))[at[0]],
                "betas": {n: betas[:, *at].astype(np.float64) for n, betas in scores.betas.items()},
                "proposed": {name: proposed[at] for name, proposed in scores.proposed.items()},
            }
        )
        num_used += len(batch.texts)
        num_tokens = sum(len(part["texts"]) for part in parts)
        tell(min(num_tokens, wanted), "scoring")
        if num_tokens >= wanted:
            break
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, -1)[..., :wanted], *parts)
    return joined, num_used


def _decode(
    repeated: _Repeated,
    draft: Draft,
    decoding: GenerateOptions,
    options: AcceptanceOptions,
    first: int,
) -> Achieved:
    """Decodes ``options.decoded_texts`` texts with a draft, with keys from place ``first`` on."""
    generator, outputs = repeated.generator.with_draft(draft), []
    for batch in repeated.batches(decoding, first, options.decoded_texts):
        decoded = generator.decode(batch, decoding)
        outputs += [output for (output,) in generator.collect(batch, decoded, decoding)]
    return achieved(outputs, repeated.numbers(first, len(outputs)), options.bootstrap())


def table(rows: Sequence[AcceptanceRow]) -> results.Table:
    """Makes a table with a line for each row, and the meaning of its columns below."""

    def efficiency(row: AcceptanceRow) -> str | None:
        decoded = row.decoded
        return decoded and f"{decoded.block_efficiency.value:.2f} (gamma {row.gamma})"

    notes = (
        "¹ E[sum min(p, q)] over tokens that the target generated (Corollary 3.6), with an "
        "interval bootstrapped over texts. ² Share of the tokens for which the draft proposed "
        "anything; alpha is over these."
    )
    if any(row.decoded for row in rows):
        notes += (
            " ³ The same mean over the positions that speculative decoding verified. ⁴ Share of "
            "the verified drafts that were accepted."
        )
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
        notes,
    )


def best(rows: Sequence[AcceptanceRow]) -> str | None:
    """Names the draft and sampling of the highest block efficiency; None if none was decoded."""
    exact = [row for row in rows if row.lenience == 1 and row.decoded]
    if not exact:
        return None
    row = max(exact, key=lambda row: row.decoded.block_efficiency.value)
    efficiency = row.decoded.block_efficiency
    return f"Best: {row.draft} at {row.sampling}, {efficiency:.2f} tokens a target call."


def cell(estimate: Estimate | None) -> str | None:
    """Formats an estimate as a table's cell, with its interval, if any; None for None."""
    return None if estimate is None else f"{estimate:.3f}"
