"""Speculative decoding equals plain decoding in combinations of settings.

Every pair of values of two settings occurs together in at least one case.
"""

import functools
import itertools

import pytest

from spec_t5x.contrib.cascade.draft import CascadeDraft
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.mixed import MixedDraft
from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.loops.pace import Costs
from spec_t5x.verifiers import largest_limit
from tests.contrib.t5gemma.toys import T5GEMMA2, tiny_t5gemma
from tests.toy_t5 import disturbed, tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

IDS = [[5, 9, 7, 5, 9, 1], [4, 1], [8, 6, 8, 6, 8, 3, 20, 21, 1], [11, 12, 1], [13, 2, 13, 2, 1]]
MODELS = {
    "t5": lambda: tiny_t5(0, num_decoder_layers=2),
    "biases by layer": lambda: tiny_t5(0, num_decoder_layers=2, relpos_per_layer=True),
    "t5gemma": lambda: tiny_t5gemma(0),
    "t5gemma2": lambda: tiny_t5gemma(0, **T5GEMMA2),
}
DRAFTS = {
    "transformer": lambda model: TransformerDraft(disturbed(model, 0.3)),
    "copy": lambda model: CopyDraft(model.vocab_size),
    "int8": SelfDraft.rounded,
    "mixed": lambda model: MixedDraft(
        CopyDraft(model.vocab_size, patience=0), TransformerDraft(disturbed(model, 0.3))
    ),
    "cascade": lambda model: CascadeDraft(disturbed(model, 0.3), CopyDraft(model.vocab_size)),
}
# Rules of decoding, and where outputs begin and end. Token n is the byte n - 3.
RULES = {
    "none": {},
    "masks": {
        "min_decode_len": 6,
        "suppress_tokens": (8, 22),
        "forced_eos_token_id": (1,),
        "output_prefix": "\x06\x04",
    },
    "history": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": ((9, 9), (3,)),
        "sequence_bias": (((5,), 2.0),),
        "stop": ("\x03\x09", "\x15"),
    },
    "first": {"forced_bos_token_id": 12, "begin_suppress_tokens": tuple(range(2, 12))},
}
SETTINGS = {
    "model": MODELS,
    "weights": ("auto", "int8"),
    "kv": ("auto", "int8"),
    "draft": DRAFTS,
    "verifier": ("block", "coupled", "tree"),
    "num_decodes": (1, 2),
    "gamma": (1, 4, "auto"),
    "batch_size": (1, 2),
    "rules": RULES,
}


def is_possible(case: dict) -> bool:
    """Tells whether the settings fit: several decodes are coupled, and a tree needs its draft."""
    is_one, verifier = case["num_decodes"] == 1, case["verifier"]
    has_tree = verifier != "tree" or case["draft"] == "transformer"
    return has_tree and (is_one or verifier == "coupled")


def pairwise() -> list[dict]:
    """Returns cases that cover each possible pair of values, chosen greedily."""
    cases = [
        dict(zip(SETTINGS, each, strict=True)) for each in itertools.product(*SETTINGS.values())
    ]
    cases = [case for case in cases if is_possible(case)]
    # Sets of pairs are numbers, in which each pair has a bit.
    bits: dict[tuple, int] = {}
    pairs_of = []
    for case in cases:
        pairs = itertools.combinations(case.items(), 2)
        pairs_of.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs))
    left, chosen = (1 << len(bits)) - 1, []
    while left:
        best = max(range(len(cases)), key=lambda i: (pairs_of[i] & left).bit_count())
        chosen.append(cases[best])
        left &= ~pairs_of[best]
    return chosen


@functools.cache
def model_of(name: str):
    return MODELS[name]()


@pytest.mark.parametrize("case", pairwise(), ids=lambda case: "-".join(map(str, case.values())))
def test_the_outputs_are_those_of_plain_decoding(case):
    model = model_of(case["model"])
    target = model.rounded() if case["weights"] == "int8" else model
    generator = Generator(
        target=target.with_kv(case["kv"]),
        vocabulary=ByteVocabulary(),
        max_source_len=16,
        draft=DRAFTS[case["draft"]](model),
    )
    options = GenerateOptions(
        **{name: case[name] for name in ("verifier", "num_decodes", "gamma", "batch_size")},
        temperature=1.0 if case["num_decodes"] > 1 else 0.0,
        widths=(2, 1) if case["verifier"] == "tree" and case["gamma"] != 1 else (),
        max_decode_len=12,
        **RULES[case["rules"]],
    )
    largest = largest_limit(options.make_verifier(), generator.draft.traits.max_worthwhile)
    whole = case["verifier"] == "tree"
    generator.assume(options, Costs.by_formula(c=0.05, largest=largest, whole=whole))
    found, expected = (
        [
            [(output.output_ids, output.output) for output in answer]
            for answer in each.generate_ids(IDS, options)
        ]
        for each in (generator, generator.plain())
    )
    assert found == expected
    assert generator.verdict(options) is None or case["gamma"] != "auto"
