"""Checks of a draft, a verifier or a target, for the tests of those who write one.

    check_draft(my_draft)
    check_verifier(MyVerifier())
    check_target(my_target, jnp.array([[5, 6, 1], [7, 1, 0]]))

Each raises an ``InputError`` that says what is wrong. With a draft or a verifier, thousands of
texts are sampled from a small target, and their frequencies compared, by a chi-square test, with
the target's *law*: the exact probability of every text. Rows of three kinds, of unequal sources,
prompts and lengths, share a batch, so that they advance unequally. A target is tested by its calls.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, as_input_error
from spec_t5x.interfaces import (
    Cache,
    Draft,
    DraftState,
    NodeTarget,
    Outcome,
    Target,
    check_parts,
    proposed,
)
from spec_t5x.labs.testing.toy_models import PrefixTarget, TableTarget, sequence_law
from spec_t5x.loops import arguments, decode_state, outputs
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, Loop
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.refill import with_input
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.loops.tree_nodes import tree_nodes
from spec_t5x.sampling.distributions import Sampling, sampling
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import EOS_ID, PAD_ID, Array, EndOfSequence, Float32, Int, PyTree
from spec_t5x.verifiers import Verifier

# The path of each leaf of a pytree, and its shape.
Shapes = list[tuple[str, tuple[int, ...]]]

VOCAB_SIZE = 4
LENGTH = 4
# Tokens that ``check_target`` feeds to each row.
FED = 7
ROWS = 12_000
# Source, prompt and number of tokens to generate of each kind; kind k has rows k, k + 3, k + 6 …
KINDS = [([2, 3], (), 4), ([3, 0], (2,), 2), ([2, 2], (EOS_ID, 3), 1)]
# The probability that a correct sampler exceeds the threshold of the chi-square test.
CHANCE = 1e-6


@functools.cache
def target() -> TableTarget:
    """Returns the target whose law is enumerated; about a fifth of its probabilities are zero."""
    return TableTarget.create(seed=0, vocab_size=VOCAB_SIZE, zeros=0.2)


@functools.cache
def other_model() -> TableTarget:
    """Returns a model like the target with other probabilities, which drafts in tests."""
    return TableTarget.create(seed=1, vocab_size=VOCAB_SIZE, zeros=0.2)


def check_draft(
    draft: Draft,
    gamma: int = 3,
    settings: Sampling | None = None,
    verifier: Verifier = DEFAULT_VERIFIER,
) -> None:
    """Checks that texts sampled with this draft follow the target's law.

    The check finds several tokens drawn with the same ``Draws``, a distribution other than the one
    drawn from, and a count of proposals that depends on the very token that it leaves out. Before
    it samples, the check finds states without rows or of unequal sizes, and proposals and new
    states of a wrong shape or type.

    Args:
      draft: a draft of ``VOCAB_SIZE`` tokens.
      gamma: tokens proposed in each iteration at most.
      settings: sampling settings with one temperature above 0; None is temperature 1.
      verifier: a lossless verifier.

    Raises:
      InputError: the texts do not follow the law, no draft was accepted, or a shape is wrong.
    """
    chosen = sampling(1.0) if settings is None else settings
    _DraftCheck(draft, _loop(gamma, verifier), chosen).run()
    _check_law(
        decode_many(draft, gamma, settings, verifier),
        settings,
        type(draft).__name__,
        "draw each token with the draws that the last `next` returned, and propose with it the "
        "very distribution that it was drawn from",
    )


def check_verifier(verifier: Verifier, gamma: int = 3, settings: Sampling | None = None) -> None:
    """Checks as ``check_draft`` that texts follow the target's law, with this verifier."""
    _loop(gamma, verifier)
    _check_law(
        decode_many(TransformerDraft(other_model()), gamma, settings, verifier),
        settings,
        type(verifier).__name__,
        "emit each token with the target's probability",
    )


def _check_law(decoded: Decoded, settings: Sampling | None, name: str, remedy: str) -> None:
    if not np.any(decoded.stats.accepted):
        raise InputError(f"{name}: no draft of {ROWS} texts was accepted, so nothing was tested")
    statistic, threshold = chi_square(decoded, sampling(1.0) if settings is None else settings)
    if statistic >= threshold:
        raise InputError(
            f"{name} breaks the target's law: chi-square {statistic:.0f} of {ROWS} texts, by "
            f"chance at most {threshold:.0f}: {remedy}"
        )


def _loop(gamma: int, verifier: Verifier) -> Loop:
    """Returns a loop's checked settings; a verifier needs a hash, as programs are kept by it."""
    loop = Loop(gamma=gamma, max_decode_len=LENGTH, verifier=verifier)
    if verifier.lossy:
        raise InputError(f"{type(verifier).__name__} is lossy, and has another law: give another")
    kind, methods = type(verifier), ("__call__", "verify_row", "verify_argmax")
    unused = [name for name in methods if getattr(kind, name) is not getattr(Verifier, name)]
    if unused and gamma and verifier.tree(gamma) is not None:
        raise InputError(
            f"{kind.__name__} has {unused[0]}, which nothing calls, as it verifies trees: give "
            "verify_node"
        )
    remedy = "make it a frozen dataclass of numbers and tuples"
    with as_input_error(f"{type(verifier).__name__} has no hash", remedy, TypeError):
        hash(verifier)
    return loop


@dataclasses.dataclass(frozen=True)
class _DraftCheck:
    """Check of the shapes and types of a draft's proposals and states, which compiles nothing."""

    draft: Draft
    loop: Loop
    settings: Sampling

    def run(self) -> None:
        if hasattr(self.draft, "commit_tree"):
            raise InputError(f"nothing calls {self.name}.commit_tree: let commit read outcome.path")
        sources, prompts, _ = rows()
        arguments.check(target(), self.draft, prompts, self.loop)
        shapes: list[Shapes] = []
        for num in (len(sources), 1):
            # The shapes are kept, as the state's class may refuse what ``eval_shape`` returns.
            jax.eval_shape(
                lambda draft, *given: shapes.append(
                    _shapes(draft.prefill(*given, self.loop.max_length))
                ),
                *(self.draft, sources[:num], prompts[:num]),
            )
        _check_rows(f"the state of {self.name}", *shapes, batch=len(sources))
        jax.eval_shape(self.refill, self.draft, sources, prompts)
        if self.loop.gamma:
            jax.eval_shape(self.iterate, self.draft, sources, prompts)

    @property
    def name(self) -> str:
        return type(self.draft).__name__

    def refill(self, draft: Draft, sources: Array, prompts: Array) -> None:
        """Takes a row from a state with room for the prompts alone, as bulk inference does."""
        rooms = self.loop.max_length, prompts.shape[1]
        kept, waiting = (draft.prefill(sources, prompts, room) for room in rooms)
        _with_first(kept, waiting, 1, len(sources), f"a state of {self.name}")

    def iterate(self, draft: Draft, sources: Array, prompts: Array) -> None:
        """Proposes and commits once, and catches up."""
        loop = self.loop
        stream, settings = arguments.prepared(
            target(), draft, prompts, jax.random.key(0), self.settings, loop
        )
        state = decode_state.init(target(), draft, sources, prompts, stream, loop)
        context = decode_state.make_context(state, settings, loop.verifier.coupled)
        first, lengths = state.draft_state, context.lengths
        tree = loop.verifier.tree(loop.gamma)
        _, state = proposed(draft, first, context, loop.gamma if tree is None else tree)
        path = None if tree is None else jnp.zeros((lengths.shape[0], loop.gamma), jnp.int32)
        outcome = Outcome(lengths=lengths, num_accepted=jnp.zeros_like(lengths), path=path)
        self.check_kept("commit", first, draft.commit(state, outcome))
        self.check_kept("catch_up", first, draft.catch_up(first, context, loop.gamma + 1))

    def check_kept(self, method: str, before: DraftState, after: DraftState) -> None:
        """Raises ``InputError`` unless both states have the same structure, shapes and types."""
        if jax.tree.structure(before) != jax.tree.structure(after):
            raise InputError(f"{self.name}.{method} changes the structure of the state: keep it")
        leaves = jax.tree_util.tree_leaves_with_path(before)
        for (path, old), new in zip(leaves, jax.tree.leaves(after), strict=True):
            was, now = (f"{jnp.result_type(one)} {list(jnp.shape(one))}" for one in (old, new))
            if was != now:
                raise InputError(
                    f"{self.name}.{method} makes {now} of the state's "
                    f"{jax.tree_util.keystr(path) or 'array'}, {was}: keep shape and type"
                )


def _shapes(tree: PyTree) -> Shapes:
    """Returns leaves' paths and shapes; skips nodes that have a method ``repeat_rows``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, lambda n: hasattr(n, "repeat_rows"))
    own = [(path, leaf) for path, leaf in leaves if not hasattr(leaf, "repeat_rows")]
    return [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in own]


def _check_rows(whose: str, several: Shapes, one: Shapes, batch: int) -> None:
    """Raises ``InputError`` unless shapes for ``batch`` rows, and for one, begin with that."""
    if len(several) != len(one):
        raise InputError(
            f"{whose} has other leaves for {batch} rows than for 1: keep its structure"
        )
    for (path, shape), (_, alone) in zip(several, one, strict=True):
        if shape[:1] != (batch,) or alone[:1] != (1,):
            raise InputError(
                f"{whose}: {path or 'it'} has shape {shape} for {batch} rows and {alone} for 1: "
                "every leaf must lead with the batch axis, as rows are repeated and taken out"
            )


def _with_first(kept: PyTree, waiting: PyTree, to: int, number: int, whose: str) -> PyTree:
    """Returns ``kept`` with input ``to`` replaced by the first of ``number`` that wait."""
    what = f"no row can be taken from {whose} of another max_length"
    remedy = "let arrays alone depend on it"
    with as_input_error(what, remedy, TypeError, ValueError):
        return with_input(kept, waiting, source=jnp.int32(0), to=jnp.int32(to), num_sources=number)


def check_target(target: Target, inputs: PyTree, *, atol: float = 1e-3) -> None:
    """Checks that a target's calls give the same logits for the same tokens, as loops assume.

    Tokens are fed one by one, in blocks, after a padded source, after a rollback, as prompts, in
    rows repeated for several decodes, in the row of another input and, if the target is a
    ``NodeTarget``, in a tree.

    Args:
      target: a target of any vocabulary.
      inputs: the argument of ``prefill``, of at least 2 rows.
      atol: the largest difference allowed between two logits.

    Raises:
      InputError: two calls disagree, or a shape is wrong.
    """
    _TargetCheck(target, inputs, atol).run()


@dataclasses.dataclass(frozen=True)
class _TargetCheck:
    target: Target
    inputs: PyTree
    atol: float

    def run(self) -> None:
        check_parts(self.target)
        self.check_leaves()
        one_by_one = self.logits_one_by_one()
        self.check_blocks(one_by_one)
        self.check_padding(one_by_one)
        self.check_rollback(one_by_one)
        self.check_repeated_rows(one_by_one)
        self.check_inserted_rows(one_by_one)
        self.check_prompts(one_by_one)
        if isinstance(self.target, NodeTarget):
            self.check_nodes(one_by_one)

    # A jitted function for this check alone: JAX may mistake a class for one with the same fields.
    @functools.cached_property
    def _call(self):
        def call(method, sizes, target, *args):
            return getattr(target, method)(*args, *sizes)

        return jax.jit(call, static_argnums=(0, 1))

    def score(self, cache: Cache, tokens: Int[Array, "batch new"], *num):
        """Calls the target's ``score``; checks shapes, and returns logits and cache."""
        logits, states, cache = self._call("score", (), self.target, cache, tokens, *num)
        self.same((*tokens.shape, self.target.vocab_size), logits, "logits")
        self.same((*tokens.shape, self.target.state_size), states, "states")
        return logits, cache

    @property
    def batch(self) -> int:
        return jax.tree.leaves(self.inputs)[0].shape[0]

    @functools.cached_property
    def tokens(self) -> Int[np.ndarray, "batch fed"]:
        """Random tokens that are fed to each row, the start token first."""
        shape, most = (self.batch, FED), self.target.vocab_size
        drawn = np.random.default_rng(0).integers(min(EOS_ID + 1, most - 1), most, shape)
        drawn[:, 0] = PAD_ID
        return drawn.astype(np.int32)

    def prefill(self, inputs: PyTree = None) -> Cache:
        # Room for the text and a tree as large as the text.
        return self._call(
            "prefill", (3 * FED,), self.target, self.inputs if inputs is None else inputs
        )

    def check_leaves(self) -> None:
        if not all(getattr(leaf, "ndim", 0) for leaf in jax.tree.leaves(self.inputs)):
            raise InputError(
                f"inputs are {self.inputs!r:.80}: give arrays with a row of each input"
            )
        if self.batch < 2:
            raise InputError("inputs have 1 row: give 2 or more, so that rows can be told apart")
        one_row = jax.tree.map(lambda leaf: leaf[:1], self.inputs)
        caches = (_shapes(self.prefill(rows)) for rows in (self.inputs, one_row))
        _check_rows("the cache", *caches, batch=self.batch)

    def logits_one_by_one(self) -> Float32[np.ndarray, "batch fed vocab"]:
        cache, logits = self.prefill(), []
        for place in range(FED):
            new, cache = self.score(cache, self.tokens[:, place : place + 1])
            logits.append(new)
        return np.concatenate(logits, axis=1)

    def check_blocks(self, expected) -> None:
        cache, start = self.prefill(), 0
        for end in (FED // 2, FED):
            logits, cache = self.score(cache, self.tokens[:, start:end])
            what = "a block of tokens gets other logits than the same ones one by one"
            self.compare(logits, expected[:, start:end], what)
            start = end
        for num in (1, FED - 1):
            logits, _ = self.score(self.prefill(), self.tokens, jnp.int32(num))
            what = f"the first {num} tokens of a block get other logits if only they matter (num)"
            self.compare(logits[:, :num], expected[:, :num], what)

    def check_padding(self, expected) -> None:
        """Pads sources, if the inputs are tokens: the sources beside one decide how much."""
        if getattr(self.inputs, "ndim", 0) != 2 or not jnp.issubdtype(self.inputs, jnp.integer):
            return
        padded = jnp.pad(self.inputs, ((0, 0), (0, 2)), constant_values=PAD_ID)
        logits, _ = self.score(self.prefill(padded), self.tokens)
        self.compare(logits, expected, "padding (0) after a source changes its logits: mask it")

    def check_rollback(self, expected) -> None:
        """Feeds tokens, rolls rows back to unequal lengths, and feeds other tokens from there."""
        kept = 1 + np.arange(self.batch, dtype=np.int32) % (FED // 2)
        is_kept = np.arange(FED)[None, :] < kept[:, None]
        other = np.where(self.tokens + 1 < self.target.vocab_size, self.tokens + 1, EOS_ID)
        _, cache = self.score(self.prefill(), np.where(is_kept, self.tokens, other))
        at = np.minimum(kept[:, None] + np.arange(FED // 2)[None, :], FED - 1)
        tokens = np.take_along_axis(self.tokens, at, axis=1)
        logits, _ = self.score(self.target.rollback(cache, kept), tokens)
        without_it, _ = self.score(cache, tokens)
        what = "rollback changes nothing: it must set each row's length"
        if not np.allclose(logits, without_it, atol=self.atol):
            what = (
                "what was rolled back still counts: score must overwrite what the cache holds "
                "from each row's length on, and look at nothing beyond"
            )
        self.compare(logits, np.take_along_axis(expected, at[..., None], axis=1), what)

    def check_repeated_rows(self, expected) -> None:
        """Repeats each row, and continues the two copies with different tokens."""
        half = FED // 2
        _, cache = self.score(self.prefill(), self.tokens[:, :half])
        cache, rest = outputs.repeat_rows(cache, 2), np.repeat(self.tokens[:, half:], 2, axis=0)
        what = "a row's logits change with its place, or the rows beside it, as num_decodes has it"
        for copy, num in ((0, FED - half), (1, FED - half - 1)):
            # One decode of each row continues the text, the other continues it backwards.
            tokens = rest.copy()
            tokens[1 - copy :: 2] = rest[::2, ::-1]
            logits, _ = self.score(cache, tokens, jnp.int32(num))
            self.compare(logits[copy::2, :num], expected[:, half : half + num], what)

    def check_inserted_rows(self, expected) -> None:
        """Replaces the last row by the first row of a cache with room for one token (refill)."""
        half, last = FED // 2, self.batch - 1
        _, cache = self.score(self.prefill(), self.tokens[:, :half])
        waiting = self._call("prefill", (1,), self.target, self.inputs)
        cache = _with_first(cache, waiting, last, self.batch, "a cache")
        tokens = np.array(self.tokens[:, half:])
        tokens[last] = self.tokens[0, : FED - half]
        logits, _ = self.score(cache, tokens)
        what = "a row that took another's place gets other logits: its state has max_length in it"
        self.compare(logits[:last], expected[:last, half:], what)
        self.compare(logits[last], expected[0, : FED - half], what)

    def check_prompts(self, expected) -> None:
        lengths = 1 + np.arange(self.batch, dtype=np.int32) % (FED - 1)
        is_prompt = np.arange(FED)[None, :] <= lengths[:, None]
        prompts = np.where(is_prompt, self.tokens, PAD_ID)
        prefill = jax.jit(lambda *args: self.target.prefill(args[0], 3 * FED, args[1]))
        cache = prefill(self.inputs, prompts)
        last = np.take_along_axis(self.tokens, lengths[:, None], axis=1)
        logits, _ = self.score(self.target.rollback(cache, lengths), last)
        expected = np.take_along_axis(expected, lengths[:, None, None], axis=1)
        self.compare(logits, expected, "after prompts in prefill the logits are not those of score")

    def check_nodes(self, expected) -> None:
        """Feeds the text as a tree's second branch, moves it to its positions and continues it."""
        tree, root = Tree((2, 1, 1)), np.full(self.batch, 1, np.int32)
        other = np.full((self.batch, tree.depth), EOS_ID, np.int32)
        ours = self.tokens[:, 2 : 2 + tree.depth]
        # Level by level: the node of the other branch, then ours.
        drafts = np.stack([other, ours], axis=2).reshape(self.batch, -1)
        tokens = np.concatenate([self.tokens[:, 1:2], drafts], axis=1)
        _, cache = self.score(self.prefill(), self.tokens[:, :1])
        nodes = tree_nodes(tree, tokens, root, self.target.num_slots(cache))
        logits, states, cache = self._call("score_nodes", (), self.target, cache, nodes)
        self.same((*tokens.shape, self.target.state_size), states, "states")
        path = np.array([0, *range(2, tree.num_nodes, 2)])
        what = "a tree's path gets other logits from score_nodes than the same tokens from score"
        self.compare(logits[:, path], expected[:, 1 : 2 + tree.depth], what)
        slots = np.tile(1 + path[None, 1:], (self.batch, 1))
        cache = self._call("move", (), self.target, cache, slots, root + 1)
        cache = self.target.rollback(cache, root + len(path))
        logits, _ = self.score(cache, self.tokens[:, 1 + len(path) :])
        what = "after move the logits are not those of the path: copy what its slots hold"
        self.compare(logits, expected[:, 1 + len(path) :], what)

    def compare(self, found, expected, what: str) -> None:
        # Minus infinities, of tokens without probability, are equal.
        found, expected = np.asarray(found), np.asarray(expected)
        with np.errstate(invalid="ignore"):
            apart = np.where(found == expected, 0.0, np.abs(found - expected))
        difference = float(np.max(apart))
        # NaN never agrees.
        if not difference <= self.atol:
            raise InputError(
                f"{type(self.target).__name__}: {what} (they differ by {difference:.3g})"
            )

    def same(self, shape: tuple[int, ...], found: Array, what: str) -> None:
        if found.shape != shape:
            raise InputError(
                f"{type(self.target).__name__}: {what} have shape {found.shape}, not {shape}"
            )


def rows(times: int = 1) -> tuple[Array, Array, Array]:
    """Returns sources, prompts and numbers of tokens to generate, ``times`` rows of each kind."""
    sources, prompts, steps = zip(*KINDS, strict=True)
    padded = [(PAD_ID, *prompt, *[PAD_ID] * (2 - len(prompt))) for prompt in prompts]
    return tuple(jnp.asarray(np.concatenate([rows] * times)) for rows in (sources, padded, steps))


def decode_many(
    draft: Draft,
    gamma: int,
    settings: Sampling | None = None,
    verifier: Verifier = DEFAULT_VERIFIER,
    model: Target | None = None,
    eos_id: EndOfSequence = EOS_ID,
) -> Decoded:
    """Decodes ``ROWS`` texts speculatively, at temperature 1 if ``settings`` is None.

    ``model``, of four tokens, replaces the target; the result is on the host.
    """
    sources, prompts, steps = rows(ROWS // len(KINDS))
    decoded = speculative_decode(
        model or target(),
        draft,
        sources,
        prompts,
        jax.random.key(7),
        sampling(1.0) if settings is None else settings,
        gamma=gamma,
        verifier=verifier,
        max_decode_len=LENGTH,
        max_decode_steps=steps,
        eos_id=eos_id,
    )
    return jax.device_get(decoded)


def chi_square(
    decoded: Decoded,
    settings: Sampling,
    model: PrefixTarget | None = None,
    eos_id: EndOfSequence = EOS_ID,
) -> tuple[float, float]:
    """Returns the chi-square statistic of texts against the target's law, and its threshold.

    Correct samplers exceed the threshold once in a million runs. If a text has probability zero,
    the statistic is infinite. ``model`` replaces the target.
    """
    statistic, freedom, lengths = 0.0, 0, decoded.lengths[:, 0].tolist()
    tokens = np.asarray(decoded.tokens[:, 0]).tolist()
    found = [tuple(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    for kind, (source, prompt, steps) in enumerate(KINDS):
        law = sequence_law(
            model or target(),
            source,
            settings,
            max_decode_len=min(LENGTH, len(prompt) + steps),
            prompt=prompt,
            eos_id=eos_id,
        )
        counts = collections.Counter(found[kind :: len(KINDS)])
        if not counts.keys() <= law.keys():
            return np.inf, 0.0
        observed = np.array([counts[text] for text in law], float)
        expected = np.array(list(law.values())) * ROWS / len(KINDS)
        statistic += np.sum((observed - expected) ** 2 / expected)
        freedom += len(law) - 1
    return float(statistic), float(stats.chi2.ppf(1 - CHANCE, freedom))
