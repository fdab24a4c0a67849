"""The Python examples of README and docs run."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from spec_t5x.generation import GenerateOptions
from spec_t5x.labs.benchmark.random_models import random_model
from spec_t5x.labs.testing import laws

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

REPOSITORY = Path(__file__).parents[2]


def examples(document: str) -> list[str]:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_first_examples_print_what_they_assert(capsys):
    first, streamed, *_ = examples("README.md")
    exec(first, names := {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(float(line.rsplit(maxsplit=1)[1]) > 1 for line in lines)
    exec(streamed, names)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("Wo ist der Bahnhof [")


def test_answers_errors_ids_and_a_stream(capsys):
    several, of_ids, streamed, *_ = examples("docs/streaming.md")
    exec(several, names := {})
    sampled, refused = capsys.readouterr().out.splitlines()
    assert sampled.startswith("[") and refused == "the text is empty: give at least one word"
    exec(of_ids, names)
    assert capsys.readouterr().out == "Wo ist der Bahnhof?\n"
    exec(streamed, names)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("Wo ist der Bahnhof? ")


def test_drafts_and_a_target_of_your_own_keep_the_text():
    parrot, sampling_draft, _, family, target = examples("docs/extending.md")
    exec(parrot, names := {"__name__": __name__})
    for example in (sampling_draft, family, target):
        exec(example, names)
    laws.check_draft(names["Frequencies"](jnp.zeros(laws.VOCAB_SIZE)))
    embedding = jax.random.normal(jax.random.key(0), (9, 4))
    laws.check_target(names["BagOfWords"](embedding), jnp.array([[5, 6, 1], [7, 1, 0]]))
    capped = random_model(names["TINY"], "float32", seed=0)
    assert isinstance(capped, names["FAMILY"].model) and capped.config.logits_softcap == 30
    laws.check_target(capped, jnp.array([[5, 6, 1], [7, 1, 0]]))
    generator, options = names["generator"], GenerateOptions(gamma=2, max_decode_len=24)
    texts = ["translate English to German: Where is the station?"]
    (ours,), (plain,) = (
        next(which.generate(texts, options)) for which in (generator, generator.plain())
    )
    assert ours.output_ids == plain.output_ids
    assert ours.proposed == 2 * ours.target_calls


ALGORITHM = {
    "loops/speculative.py": ("step", "verify"),
    "verifiers.py": ("TokenVerifier",),
    "sampling/verification.py": ("token_verification", "count_accepted", "emission_rows"),
}


def test_the_algorithm_has_as_many_lines_as_readme_claims():
    lines = 0
    for file, names in ALGORITHM.items():
        tree = ast.parse((REPOSITORY / "spec_t5x" / file).read_text(encoding="utf-8"))
        parts = {getattr(node, "name", None): node for node in tree.body}
        lines += sum(parts[name].end_lineno - parts[name].lineno + 1 for name in names)
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (claimed,) = re.findall(r"The algorithm is under (\d+) lines", text)
    assert int(claimed) - 25 < lines < int(claimed)
    assert len(text.split()) <= 900
