"""Other implementations: with our weights and ids they give our ids; figures of timings."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from benchmarks.other_implementations import __main__ as command
from benchmarks.other_implementations import bound, implementations, one_run, rounds, workload
from benchmarks.other_implementations.rounds import Row, make_rows
from benchmarks.other_implementations.table import table
from benchmarks.other_implementations.workload import Workload
from spec_t5x.checkpoints.loading import load
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.models import sizes
from spec_t5x.types import EOS_ID, PAD_ID
from tests.labs.benchmark import test_simulated_acceptance

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Texts of one bucket, so that each program is compiled once; the second's output ends early.
TEXTS = ("My sister", "Wir gehen", "Nobody knows")
TINY = dataclasses.replace(test_simulated_acceptance.TINY, vocab_size=384, num_decoder_layers=1)


@pytest.fixture(scope="module")
def pair(tiny_pair, tmp_path_factory) -> Workload:
    """Provides the tiny pair, with its copies."""
    target, draft = (str(tiny_pair / name) for name in ("target", "draft"))
    folder, settings = tmp_path_factory.mktemp("copies"), {"max_decode_len": 12, "threads": 1}
    found, config = workload.of_pair(target, draft, [*TEXTS, "x " * 40], folder, **settings)
    assert found.title == "target with draft"
    # The last text has more than the 48 tokens that the target takes.
    assert len(found.inputs) == 3 and config == load(target).config
    return found


@pytest.fixture(scope="module")
def expected(pair) -> list[list[int]]:
    """Provides the generator's outputs."""
    options = GenerateOptions(max_decode_len=12)
    outputs = [
        generation.output_ids
        for (generation,) in Generator.load(pair.target).generate(TEXTS, options)
    ]
    # One output ends and another is cut.
    assert len({EOS_ID in ids for ids in outputs}) == 2
    return outputs


@pytest.mark.parametrize(
    ("name", "library", "arguments"),
    [
        ("ours", "jax", {"draft": "draft", "gamma": 2, "verifier": "token"}),
        ("transformers", "transformers", {"cache": "static"}),
        ("transformers", "transformers", {"assisted": True, "gamma": 3}),
        ("ctranslate2", "ctranslate2", {"compute_type": "float32"}),
        ("t5x", "t5x.models", {}),
    ],
    ids=str,
)
def test_every_implementation_decodes_our_ids(
    pair, expected, name, library, arguments, monkeypatch
):
    pytest.importorskip(library, reason=f"needs {library}")
    # A separate process would import PyTorch once more.
    monkeypatch.setattr(
        implementations, "ProcessPoolExecutor", lambda num, **_: ThreadPoolExecutor(num)
    )
    if "draft" in arguments:
        arguments = arguments | {"draft": pair.target.replace("target", "draft")}
    # T5X promotes ranks.
    with jax.numpy_rank_promotion("allow"):
        version, decode = getattr(implementations, name)(pair, **arguments)
        assert [one_run.until_end(decode(ids, 12)) for ids in pair.inputs] == expected
        assert decode(pair.inputs[0], 1) == expected[0][:1]
    assert version[:4].lower() in ("spec", name[:4], "t5x ")


def test_random_weights_are_read_by_all_and_decode_to_the_last_token(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    larger = dataclasses.replace(TINY, num_decoder_layers=2)
    for name, config in {"tiny": TINY, "larger": larger}.items():
        monkeypatch.setitem(sizes.SIZES, name, config)
    settings = {"alphas": (1.0, 0.9), "max_decode_len": 20, "threads": 1}
    given = workload.of_sizes(["tiny", "larger"], "tiny", 8, tmp_path, **settings)
    own_draft, config = next(given)
    # A model is no draft of itself.
    assert own_draft.draft_copy is None and config == TINY
    drafted, config = next(given)
    assert not (tmp_path / "tiny").exists() and config == larger
    (ids,) = drafted.inputs
    assert len(ids) == 8 and ids[-1] == EOS_ID
    rows = make_rows(drafted, ["random", "int8"], [3], weights=["auto", "int4"])
    assert [row.name for row in rows if row.implementation == "ours"] == [
        *("spec_t5x, plain", "spec_t5x, random at 1, gamma 3", "spec_t5x, int8 at 0.9, gamma 3"),
        "spec_t5x in int4, plain",
        "spec_t5x in int4, random at 1, gamma 3",
        "spec_t5x in int4, int8 at 0.9, gamma 3",
    ]
    assert not any("assisted" in row.name for row in rows)
    for arguments in (rows[1].arguments, rows[5].arguments):
        _, decode = implementations.ours(drafted, **arguments)
        found = decode(ids, 20)
        assert len(found) == 20 and not {EOS_ID, PAD_ID} & set(found)
    _, decode = implementations.transformers(drafted)
    assert decode(ids, 20) == implementations.ours(drafted)[1](ids, 20)


# Rounds and figures


PLAIN, DRAFTED = Row("plain", "ours"), Row("drafted", "ours", speculative=True)
OTHER, ABSENT = Row("other", "t5x", exact=False), Row("absent", "transformers")
# Two inputs, 20 tokens in all: seconds in three rounds.
SECONDS = {"plain": [0.04, 0.06, 0.05], "drafted": [0.02, 0.02, 0.025], "other": [0.08, 0.075, 0.1]}


@pytest.fixture
def group(monkeypatch) -> dict:
    """Provides what ``measure`` returns for chosen timings, at 1 GB/s."""
    outputs, ran = [[5] * 12, [6] * 7 + [EOS_ID]], []

    def run(given, row):
        ran.append(row.name)
        if row == ABSENT:
            return {"problem": "not installed: No module named 'transformers'"}
        number = ran.count(row.name) - 1
        result = {"version": f"{row.name} 1.0", "outputs": outputs, "peak_bytes": 300 * 2**20}
        if row == OTHER:
            result["outputs"] = [[5] * 12, [6] * 6 + [9, EOS_ID]]
        first = {"first_token_seconds": 0.004, "compile_seconds": 2.34}
        return {**result, **first, "seconds": SECONDS[row.name][number]}

    monkeypatch.setattr(rounds, "run", run)
    monkeypatch.setattr(rounds, "bytes_read", lambda config, lengths: (4_000_000, 20_000_000))
    monkeypatch.setattr(rounds, "read_bandwidth", lambda num_bytes, threads: 1e9)
    given = Workload(
        title="a pair",
        target="",
        target_copy="",
        inputs=[[3] * 6, [4] * 5],
        max_source_len=16,
        max_decode_len=16,
        threads=2,
    )
    found = rounds.measure(given, TINY, [PLAIN, DRAFTED, OTHER, ABSENT], 3)
    # Rows take turns in going first, and a row with a problem does not run again.
    assert ran == [
        *("plain", "drafted", "other", "absent"),
        *("drafted", "other", "plain"),
        *("other", "plain", "drafted"),
    ]
    return json.loads(json.dumps(found))


def test_the_table_has_medians_over_rounds(group):
    text = table([group], {"processor": "A processor"})
    lines = text.splitlines()
    assert lines[0] == "A processor, 2 threads, float32, batch 1, greedy."
    assert lines[2] == (
        "**a pair**: 2 sources of 5.5 tokens, outputs of 10.0. A step reads 1 MB, at 1.0 GB/s."
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    # 24 MB for 20 tokens at 1 GB/s, of which 20 MB are the steps'. Without the first tokens, the
    # median of 36, 56 and 46 ms, for 18 tokens.
    plain = ["plain", "2.50", "1.00", "2.08", "2.56 (2.56)", "2.00", "2.3", "300", "yes"]
    assert rows[2] == plain
    # Ratios of each round: 2, 3 and 2; 0.5, 0.8 and 0.5.
    assert rows[3][:5] == ["drafted", "1.00", "2.00", "0.83", "—"]
    assert [rows[4][n] for n in (0, 2, -1)] == ["other⁴", "0.50", "1 differ"]
    assert rows[5][:2] == ["absent", "not installed: No module named 'transformers'"]
    assert rows[6][:5] == ["memory-bandwidth bound", "1.20", "", "1", "1.00"]
    assert "⁴ The weights are rounded" in text
    assert lines[-1] == "Versions: plain 1.0; drafted 1.0; other 1.0."
    group["rows"] = group["rows"][:2]
    for row in group["rows"]:
        del row["compile_seconds"], row["peak_bytes"]
    text = table([group | {"alphas": [0.75, 0.9]}], {"processor": "A processor"})
    assert "⁴" not in text and "compile" not in text
    assert "random weights, acceptances simulated at 0.75, 0.9" in text


# Processes


def test_a_row_runs_in_a_separate_process_and_its_problem_is_a_line(pair, expected):
    result = rounds.run(pair, Row("plain", "ours"))
    assert result["outputs"] == expected
    assert min(result["seconds"], result["first_token_seconds"]) > 0
    assert result["peak_bytes"] > 100 * 2**20
    result = rounds.run(pair, Row("x", "transformers", {"gama": 3}))
    assert result["problem"].startswith("does not run: TypeError: ")


def test_compilation_is_what_the_first_decoding_takes_longer(pair, monkeypatch):
    """By the test's clock, programs are compiled in 5 s and a token takes 2 s."""
    now, compiled = [0.0], []

    def ours(given):
        def decode(ids, max_tokens):
            now[0] += 2 * max_tokens + (0 if compiled else 5)
            compiled.append(True)
            return [7] * max_tokens

        return "ours 1.0", decode

    monkeypatch.setattr(implementations, "ours", ours)
    monkeypatch.setattr(one_run.time, "perf_counter", lambda: now[0])
    result = one_run.measure(pair, "ours", {})
    tokens = len(pair.inputs) * pair.max_decode_len
    assert result["seconds"] == 2 * tokens and result["compile_seconds"] == 5
    assert result["first_token_seconds"] == 2 * len(pair.inputs)


# The bound


def test_a_step_reads_its_weights_and_the_caches_in_use():
    joined = TINY.num_heads * TINY.head_dim
    # Counted by hand. The encoder's call has the kernels of the source's keys and values.
    attention, cross = 4 * TINY.emb_dim * joined, 2 * TINY.emb_dim * joined
    layer = attention + cross + 3 * TINY.emb_dim * TINY.mlp_dim + 3 * TINY.emb_dim
    weights = layer + TINY.emb_dim * (TINY.vocab_size + 2) + TINY.relpos_num_buckets * 2
    _, decoder = bound.bytes_read(TINY, [(5, 3), (7, 1)])
    # Positions of the source and of the output that the four steps attend to.
    attended = 3 * 5 + (1 + 2 + 3) + 7 + 1
    assert decoder == 4 * (4 * weights + 2 * joined * attended)
    # The encoder reads once for each input.
    once, longer, twice = ([(5, 3)], [(5, 30)], [(5, 3), (5, 1)])
    encoder = [bound.bytes_read(TINY, lengths)[0] for lengths in (once, longer, twice)]
    assert encoder == [encoder[0], encoder[0], 2 * encoder[0]]


# The command


def test_the_command_compares_a_pair(tiny_pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        rounds, "run", lambda given, row: one_run.measure(given, row.implementation, row.arguments)
    )
    monkeypatch.setattr(command, "_pin", lambda threads: 1)
    data, kept = tmp_path / "pairs.tsv", tmp_path / "figures.json"
    data.write_text("x\tMy sister\ty\nx\tWir gehen\ty\nx\tNobody knows\ty\n", encoding="utf-8")
    flags = {"target": tiny_pair / "target", "draft": tiny_pair / "draft", "data": data}
    flags |= {"gamma": 2, "num_inputs": 2, "max_decode_len": 12, "rounds": 1, "json": kept}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    assert command.main([*arguments, "--others"]) == 0
    printed = capsys.readouterr().out
    assert "**target with draft**: 2 sources of" in printed
    assert printed.count("| yes ") == 2
    report = json.loads(kept.read_text(encoding="utf-8"))
    assert report["machine"]["platform"] == "cpu"
    assert table(report["groups"], report["machine"]) == printed.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "1000000"], "threads is 1000000: give 1 to"),
        (["--target", "lm-target"], "target lm-target is not a T5"),
        (["--size", "byt5_small"], "byt5_small and its draft t5_1_1_small have different"),
        (["--size", "t5_1_1_small", "--draft", "int8", "int4"], "2 drafts and 1 acceptance rates"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert command.main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("other_implementations: error: ") and message in line
