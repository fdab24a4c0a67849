"""Trees compiled for a TPU v4 that is not there: the figures, counted by hand."""

import dataclasses
import json
import re
import types

import pytest

from spec_t5x.cli.main import main
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.labs.tpu import compilation, programs
from spec_t5x.labs.tpu.options import Options
from spec_t5x.labs.tpu.step_costs import step_cost
from spec_t5x.labs.tpu.tables import tables
from spec_t5x.models import sizes
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.verifiers import TreeVerifier
from tests.labs.tpu.test_compilation import (  # noqa: F401
    BIAS,
    CONFIG,
    JOINED,
    SCALES,
    WORK,
    cached_numbers,
    environment,
    mesh,
    operations,
    plain,
    plain_step,
)

# Nodes at the depths: 1, 3, 6, 6.
TREE = Tree((3, 2, 1))


def test_verification_of_a_tree_scores_all_nodes_and_reads_what_a_step_reads(plain_step):  # noqa: F811
    devices = mesh(1)
    model = programs.abstract_model(CONFIG, devices)
    tree = TreeVerifier(TREE.branching)
    compiled, cache = programs.verification(model, WORK, TREE.depth, devices, tree)
    cost = step_cost(compiled, model, cache, TREE.num_nodes)
    more_rows = 2 * WORK.batch * (TREE.num_nodes - 1) * CONFIG.emb_dim
    assert cost.weight_bytes == plain_step[1].weight_bytes + more_rows
    slots = WORK.max_decode_len + TREE.num_nodes
    assert cost.cache_bytes == 2 * cached_numbers(slots)
    assert cost.operations == pytest.approx(operations(TREE.num_nodes, slots), rel=0.2)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_of_a_transformer_scores_the_nodes_of_its_depth(depth):
    devices = mesh(1)
    model = programs.abstract_model(CONFIG, devices)
    draft = TransformerDraft(model)
    compiled, cache = programs.level_step(model, draft, WORK, TREE, depth, devices)
    nodes = TREE.level_sizes[depth]
    cost = step_cost(compiled, model, cache, nodes)
    slots = WORK.max_decode_len + TREE.num_nodes
    assert cost.cache_bytes == 2 * cached_numbers(slots)
    assert cost.operations == pytest.approx(operations(nodes, slots), rel=0.3)
    # Tokens and probabilities of the nodes and of the level's root, and the donated state.
    tokens = nodes * (1 + TREE.branching[depth])
    kept = compiled.out_info[0]
    assert kept.tokens.shape == (WORK.batch, tokens)
    assert kept.probs.shape == (WORK.batch, 1 + nodes, CONFIG.vocab_size)


@pytest.mark.parametrize("width", [None, 128])
def test_a_step_of_a_head_scores_the_nodes_of_its_depth(width):
    devices = mesh(1)
    target = programs.abstract_model(CONFIG, devices)
    head = programs.abstract_head(target, devices, width)
    compiled, cache = programs.level_step(target, head, WORK, TREE, 1, devices)
    nodes = TREE.level_sizes[1]
    cost = step_cost(compiled, head.model, cache, nodes)
    dim, mlp_dim = width or CONFIG.emb_dim, CONFIG.mlp_dim * (width or CONFIG.emb_dim) // 256
    layer = 6 * dim * JOINED + 3 * dim * mlp_dim + 4 * dim + BIAS
    output, fusion = dim * CONFIG.vocab_size, (CONFIG.emb_dim + dim) * dim
    rows = WORK.batch * nodes * CONFIG.emb_dim
    assert cost.weight_bytes == 2 * (layer + output + fusion + rows)
    assert cost.cache_bytes == 2 * cached_numbers(WORK.max_decode_len + TREE.num_nodes) // 2
    # The states of all nodes are kept for their children.
    assert cache.states.shape == (WORK.batch, TREE.num_nodes, dim)


def test_heads_that_four_chips_do_not_divide_are_whole_and_their_matrices_shared(plain_step):  # noqa: F811
    _, alone = plain_step
    _, cost = plain(4)
    # Two heads on four chips: each has the whole caches, and a quarter of each matrix.
    assert cost.cache_bytes == alone.cache_bytes
    whole = 2 * (SCALES + BIAS + WORK.batch * CONFIG.emb_dim)
    assert cost.weight_bytes - whole == (alone.weight_bytes - whole) / 4


def test_a_tree_of_such_a_draft_compiles_for_four_chips():
    devices = mesh(4)
    target = programs.abstract_model(dataclasses.replace(CONFIG, num_heads=4), devices)
    draft = TransformerDraft(programs.abstract_model(CONFIG, devices))
    _, cache = programs.level_step(target, draft, WORK, TREE, 1, devices)
    assert all("model" not in each.keys.sharding.spec for each in cache.layers)
    tree = TreeVerifier(TREE.branching)
    compiled = programs.loop(target, draft, WORK, TREE.depth, devices, tree)
    assert compiled.memory_analysis().argument_size_in_bytes


def test_the_command_predicts_each_tree_at_each_block_efficiency(monkeypatch, tmp_path, capsys):
    tiny = dataclasses.replace(CONFIG, vocab_size=256, num_decoder_layers=1)
    monkeypatch.setitem(sizes.SIZES, "tiny", tiny)
    path = tmp_path / "report.json"
    flags = "--target tiny --draft eagle:128 --gamma 2 --source_len 24 --max_decode_len 15"
    trees = "--verifier tree --widths 2 --widths 3,2 --block_efficiency 2.5 --block_efficiency 3"
    assert main(["compile-tpu", *flags.split(), *trees.split(), "--json", str(path)]) == 0
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("| eagle:128 | 3,2 | 10 |") for line in lines)

    (result,) = json.loads(path.read_text())["results"]
    assert result["pairs"] == result["table_2"] == []
    # The loop has the larger tree.
    assert [loop["branching"] for loop in result["loops"]] == [[], [3, 2]]
    seconds = {
        (s["kind"], *s["branching"], s["cost"]["new_tokens"]): s["seconds"] for s in result["steps"]
    }
    assert seconds.keys() == {
        ("plain", 1),
        ("draft", 3, 2, 1),
        ("draft", 3, 2, 3),
        ("verification", 3, 2, 10),
        ("draft", 2, 1, 1),
        ("draft", 2, 1, 2),
        ("verification", 2, 1, 5),
    }
    predictions = {(*t["branching"], t["block_efficiency"]): t for t in result["trees"]}
    assert predictions.keys() == {(3, 2, 2.5), (3, 2, 3.0), (2, 1, 2.5), (2, 1, 3.0)}
    drafting = seconds["draft", 3, 2, 1] + seconds["draft", 3, 2, 3]
    iteration = drafting + seconds["verification", 3, 2, 10]
    speed_up = 2.5 * seconds["plain", 1] / iteration
    assert predictions[3, 2, 2.5]["speed_up"] == pytest.approx(speed_up)


def test_steps_alone_have_no_memory_and_what_a_tree_cannot_reach_is_not_predicted(monkeypatch):
    # Nothing is compiled: other tests have the costs.
    costs = {"flops": 1.0, "bytes accessed": 1.0}
    program = types.SimpleNamespace(cost_analysis=lambda: costs, as_text=str)
    monkeypatch.setattr(programs, "_compile", lambda *_, **__: program)
    monkeypatch.setitem(sizes.SIZES, "tiny", dataclasses.replace(CONFIG, num_decoder_layers=1))
    options = Options(
        target="tiny", drafts=("tiny",), gamma=2, verifier="multi", work=WORK, steps_only=True
    )
    (result,) = compilation.run(options)
    assert result.loops == ()
    # Three chains of two drafts; at most three tokens a call.
    assert [tree.nodes for tree in result.trees] == [7, 7]
    assert [tree.block_efficiency for tree in result.trees] == [2.5, 3.0]
    assert [str(part).split()[1] for part in tables(result)] == ["1", "step", "draft"]
