"""Compiled for a TPU v4 that is not there, at a small size: the figures, counted by hand."""

import dataclasses
import functools
import json
import math
import re
import types

import jax
import jaxtyping
import pytest

from spec_t5x.cli.main import main
from spec_t5x.errors import InputError
from spec_t5x.labs import requirements
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.theory.formulas import wall_time_improvement
from spec_t5x.labs.tpu import chips as tpu_chips
from spec_t5x.labs.tpu import programs, step_costs
from spec_t5x.labs.tpu.chips import CHIPS
from spec_t5x.labs.tpu.compilation import _Compiler
from spec_t5x.labs.tpu.options import Options, Workload
from spec_t5x.labs.tpu.step_costs import Collective, StepCost, collectives, step_cost
from spec_t5x.models import sizes
from spec_t5x.models.binding import expected_shapes
from spec_t5x.models.partitioning import make_mesh
from spec_t5x.models.t5 import T5Config
from spec_t5x.verifiers import TokenVerifier

if reason := tpu_chips.no_compiler():
    pytest.skip(reason, allow_module_level=True)

# Whole tiles of a TPU, so that nothing is padded.
CONFIG = T5Config(
    vocab_size=1024,
    emb_dim=256,
    num_heads=2,
    head_dim=128,
    mlp_dim=512,
    num_encoder_layers=1,
    num_decoder_layers=2,
    mlp_activations=("gelu", "linear"),
    logits_via_embedding=False,
)
# With one row XLA would count the conversions of its vector units.
WORK = Workload(batch=2, source_len=128, max_decode_len=127)
GAMMA = 7


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Sets the command's environment; checks no types, because shapes replace arrays."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tpu_chips.ENVIRONMENT.items():
            patch.setenv(name, value)
        jaxtyping.config.update("jaxtyping_disable", True)
        yield
        jaxtyping.config.update("jaxtyping_disable", False)


def mesh(chips: int, topology: str = "v4:2x2x1"):
    _, devices = tpu_chips.topology(topology)
    return make_mesh(1, chips, devices[:chips])


def test_meshes_of_chips_in_a_grid():
    """JAX alone splits no axis of a v4's chips, and asserts what is no grid."""
    _, devices = tpu_chips.topology("v4:4x4x1")
    found = make_mesh(8, 2, devices).devices
    assert found.shape == (8, 2)
    # The two chips of a model are neighbours.
    assert {
        sum(abs(a - b) for a, b in zip(one.coords, two.coords, strict=True)) for one, two in found
    } == {1}
    with pytest.raises(InputError, match="a mesh of 1 by 3 does not fit the places of the 3 chips"):
        mesh(3)


@functools.cache
def plain(
    chips: int,
    config: T5Config = CONFIG,
    weights: str = "auto",
    topology: str = "v4:2x2x1",
    kv: str = "auto",
    work: Workload = WORK,
):
    devices = mesh(chips, topology)
    model = programs.abstract_model(config, devices, weights, kv)
    compiled, cache = programs.plain_step(model, work, devices)
    return compiled, step_cost(compiled, model, cache, new_tokens=1)


@pytest.fixture(scope="module")
def plain_step():
    yield plain(1)
    plain.cache_clear()


@pytest.fixture(scope="module")
def verification():
    devices = mesh(1)
    model = programs.abstract_model(CONFIG, devices)
    compiled, cache = programs.verification(model, WORK, GAMMA, devices)
    return compiled, step_cost(compiled, model, cache, new_tokens=GAMMA + 1)


# By hand, for a step of the decoder: four projections of its states, two of the source's,
# the feed-forward block, the output layer.
JOINED = CONFIG.num_heads * CONFIG.head_dim
MATRICES = (
    CONFIG.num_decoder_layers * (6 * CONFIG.emb_dim * JOINED + 3 * CONFIG.emb_dim * CONFIG.mlp_dim)
    + CONFIG.emb_dim * CONFIG.vocab_size
)
SCALES = (3 * CONFIG.num_decoder_layers + 1) * CONFIG.emb_dim
BIAS = CONFIG.num_heads * CONFIG.relpos_num_buckets


def cached_numbers(length: int) -> int:
    """Keys and values, of the decoder's tokens and of the source's."""
    of_a_row = CONFIG.num_decoder_layers * 2 * JOINED * (length + WORK.source_len)
    return WORK.batch * of_a_row


def operations(tokens: int, length: int) -> int:
    """Multiplications and additions of ``tokens`` tokens in each row."""
    attention = CONFIG.num_decoder_layers * 2 * JOINED * (length + WORK.source_len)
    return 2 * WORK.batch * tokens * (MATRICES + attention)


def test_a_step_reads_each_weight_of_the_decoder_once(plain_step):
    _, cost = plain_step
    rows_of_the_embedding = WORK.batch * CONFIG.emb_dim
    assert cost.weight_bytes == 2 * (MATRICES + SCALES + BIAS + rows_of_the_embedding)
    assert cost.cache_bytes == 2 * cached_numbers(WORK.max_decode_len + 1)


def test_the_program_takes_what_was_counted(plain_step):
    compiled, cost = plain_step
    table = 2 * CONFIG.emb_dim * (CONFIG.vocab_size - WORK.batch)
    arguments = compiled.memory_analysis().argument_size_in_bytes
    # The rest are the rows' texts, keys and lengths.
    assert 0 <= arguments - (cost.bytes_read + table) < 20_000


def test_operations_are_those_of_the_shapes(plain_step, verification):
    step = operations(1, WORK.max_decode_len + 1)
    assert plain_step[1].operations == pytest.approx(step, rel=0.2)
    verified = operations(GAMMA + 1, WORK.max_decode_len + GAMMA + 1)
    assert verification[1].operations == pytest.approx(verified, rel=0.2)
    ratio = verification[1].operations / plain_step[1].operations
    assert ratio == pytest.approx(GAMMA + 1, rel=0.15)


def test_verification_reads_what_a_step_reads(plain_step, verification):
    more_rows = 2 * WORK.batch * GAMMA * CONFIG.emb_dim
    assert verification[1].weight_bytes == plain_step[1].weight_bytes + more_rows
    longer = 2 * cached_numbers(WORK.max_decode_len + GAMMA + 1)
    assert verification[1].cache_bytes == longer


@pytest.mark.parametrize(("weights", "bits", "group"), [("int8", 8, 0), ("int4", 4, 64)])
def test_rounded_weights_are_widened_within_their_products(weights, bits, group):
    # The compiler would not mind a small copy.
    config = dataclasses.replace(CONFIG, emb_dim=1024, mlp_dim=4096, num_decoder_layers=1)
    compiled, cost = plain(1, config, weights)
    matrix = config.emb_dim * config.mlp_dim
    assert compiled.memory_analysis().temp_size_in_bytes < matrix // 4
    _, whole = plain(1, config)
    scales = 4 * matrix // (group or config.mlp_dim)
    less = whole.weight_bytes - cost.weight_bytes
    assert less > 3 * (2 * matrix - matrix * bits // 8 - scales)


def test_a_source_in_int8_is_widened_within_its_products():
    """The step has a byte for each number, and a scale for 64 of them; no array is a wide copy."""
    config = dataclasses.replace(CONFIG, num_heads=16, head_dim=64, num_decoder_layers=1)
    # Of another length than the text.
    work = dataclasses.replace(WORK, source_len=256)
    compiled, cost = plain(1, config, kv="int8", work=work)
    _, whole = plain(1, config, work=work)
    numbers = 2 * work.batch * work.source_len * config.num_heads * config.head_dim
    assert whole.cache_bytes - cost.cache_bytes == numbers - 2 * numbers // 64
    shape = f"bf16[{work.batch},{config.num_heads},{work.source_len},{config.head_dim}]"
    assert shape.replace("bf16", "s8") in compiled.as_text()
    fused = re.compile(r"^%?fused_computation.*?^}", re.DOTALL | re.MULTILINE)
    assert shape not in fused.sub("", compiled.as_text())
    # The compiler's count of bytes, too, though it has more in it.
    assert cost.compiler_bytes < whole.compiler_bytes - numbers // 2


def test_two_chips_share_weights_and_exchange_states(plain_step):
    _, alone = plain_step
    assert alone.collectives == ()
    _, cost = plain(2)
    whole = 2 * (SCALES + WORK.batch * CONFIG.emb_dim)
    assert cost.weight_bytes - whole == (alone.weight_bytes - whole) / 2
    assert cost.cache_bytes == alone.cache_bytes / 2
    found = {c.kind: c for c in cost.collectives}
    # The embedding, then two attentions and a feed-forward block a layer; the logits are
    # gathered, as one more sum or as a gather.
    states = 1 + 3 * CONFIG.num_decoder_layers
    state = 2 * WORK.batch * CONFIG.emb_dim
    logits = 4 * WORK.batch * CONFIG.vocab_size
    assert sum(c.count for c in found.values()) == states + 1
    assert sum(c.result_bytes for c in found.values()) == states * state + logits
    assert cost.operations == pytest.approx(alone.operations / 2, rel=0.2)


def test_two_chips_that_verify_gather_the_logits_and_no_matrix():
    devices = mesh(2)
    model = programs.abstract_model(CONFIG, devices)
    compiled, _ = programs.verification(model, WORK, GAMMA, devices)
    found = {each.kind: each.result_bytes for each in collectives(compiled.as_text())}
    assert found["all-gather"] == 4 * WORK.batch * (GAMMA + 1) * CONFIG.vocab_size


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_chip_compiles_the_step_that_v4_does(topology):
    (_, cost), (_, expected) = plain(2, topology=topology), plain(2)
    assert (cost.bytes_read, cost.collectives) == (expected.bytes_read, expected.collectives)
    assert cost.operations == pytest.approx(expected.operations, rel=0.05)


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5p:2x2x2", "v6e:1x1", "v6e:2x4"])
def test_a_device_is_a_chip(topology):
    chip, devices = tpu_chips.topology(topology)
    kind, _, layout = topology.partition(":")
    assert chip is CHIPS[kind]
    assert len(devices) == math.prod(map(int, layout.split("x")))


@pytest.mark.parametrize("width", [None, 128])
def test_a_step_of_a_head_reads_one_layer_and_its_output(width):
    devices = mesh(1)
    target = programs.abstract_model(CONFIG, devices)
    head = programs.abstract_head(target, devices, width)
    compiled, cache = programs.head_step(target, head, WORK, GAMMA, devices)
    cost = step_cost(compiled, head.model, cache, new_tokens=1)
    dim, mlp_dim = width or CONFIG.emb_dim, CONFIG.mlp_dim * (width or CONFIG.emb_dim) // 256
    layer = 6 * dim * JOINED + 3 * dim * mlp_dim + 4 * dim + BIAS
    output, fusion = dim * CONFIG.vocab_size, (CONFIG.emb_dim + dim) * dim
    rows = WORK.batch * CONFIG.emb_dim
    assert cost.weight_bytes == 2 * (layer + output + fusion + rows)
    assert cost.cache_bytes == 2 * cached_numbers(WORK.max_decode_len + 1) // 2


def test_collectives_are_read_from_the_program():
    program = """
  %all-reduce.1 = bf16[1,8,768]{2,1,0:T(8,128)(2,1)S(3)} all-reduce(%f), replica_groups={{0,1,2,3}}
  %all-reduce.2 = (f32[4]{0}, f32[8]{0}) all-reduce(%a, %b), replica_groups=[1,2]<=[2], to_apply=%s
  %ag = (f32[4]{0}, f32[16]{0}, u32[]) all-gather-start(%x), replica_groups=[1,4]<=[4]
  %done = f32[16]{0} all-gather-done(%ag)
  %rs = bf16[2]{0} reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b', 'c'}, to=%s
  %all = f32[8]{0} all-to-all(%x), replica_groups={{0,1,2,3}}
  %p = pred[6]{0} collective-permute(%x), source_target_pairs={{0,1}}
  %fusion = f32[4] fusion(%all-reduce.1), calls=%c
"""
    assert collectives(program) == (
        Collective(kind="all-gather", count=1, result_bytes=64, sent_bytes=48.0),
        Collective(
            kind="all-reduce",
            count=2,
            result_bytes=2 * 8 * 768 + 48,
            sent_bytes=1.5 * 2 * 8 * 768 + 48.0,
        ),
        Collective(kind="all-to-all", count=1, result_bytes=32, sent_bytes=24.0),
        Collective(kind="collective-permute", count=1, result_bytes=6, sent_bytes=6.0),
        Collective(kind="reduce-scatter", count=1, result_bytes=4, sent_bytes=12.0),
    )
    with pytest.raises(ValueError, match="no replica_groups in a known form"):
        collectives("%a = f32[4]{0} all-reduce(%x), replica_groups=elsewhere")


def cost(**changes) -> StepCost:
    values = {
        "new_tokens": 1,
        "operations": 0.0,
        "weight_bytes": 0,
        "cache_bytes": 0,
        "compiler_bytes": 0.0,
        "collectives": (),
    }
    return StepCost(**{**values, **changes})


def test_chips_are_those_of_the_published_figures():
    """Tera-operations, GB of memory traffic, GiB of memory; links from figures of all of them."""
    assert {name: (c.flops / 1e12, c.memory_bandwidth / 1e9) for name, c in CHIPS.items()} == {
        "v4": (275, 1200),
        "v5e": (197, 819),
        "v5p": (459, 2765),
        "v6e": (918, 1600),
    }
    assert [chip.memory / 2**30 for chip in CHIPS.values()] == [32, 16, 95, 32]
    bits_of_links = {"v5e": (1600e9, 4), "v5p": (4800e9, 6), "v6e": (8 * 400e9, 4)}
    for name, (bits, links) in bits_of_links.items():
        assert CHIPS[name].link_bandwidth == bits / 8 / links


def test_the_slower_of_memory_and_arithmetic_decides():
    v4 = CHIPS["v4"]
    sent = Collective(kind="all-reduce", count=3, result_bytes=1, sent_bytes=50e6)
    reading = cost(weight_bytes=900_000_000, cache_bytes=300_000_000, operations=1e9)
    assert reading.seconds(v4) == pytest.approx(1e-3)
    assert cost(weight_bytes=1200, operations=275e9).seconds(v4) == pytest.approx(1e-3)
    sending = cost(weight_bytes=1_200_000_000, collectives=(sent,))
    assert sending.seconds(v4) == pytest.approx(2e-3)


@pytest.mark.parametrize(("gamma", "shown"), [(1, (2.0,)), (2, (2.5, 3.0)), (3, (2.5, 3, 3.5, 4))])
def test_no_tree_is_predicted_to_append_more_tokens_than_it_can(gamma, shown):
    options = Options(verifier="tree", widths=((2,),), gamma=gamma)
    assert options.tokens_per_call == shown


def test_a_program_that_the_compiler_finds_no_room_for_does_not_fit(monkeypatch):
    def out_of_memory(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: XLA:TPU compile ran out of memory")

    monkeypatch.setattr(programs, "_compile", out_of_memory)
    compiler = _Compiler(Options(target="t5_1_1_small"), CHIPS["v4"], mesh(1))
    memory = compiler.loop(None)
    assert not memory.fits
    assert memory.arguments == 2 * 76_961_152
    with pytest.raises(InputError, match="a call of t5_1_1_small over 1 tokens needs more than"):
        compiler.plain()


def test_a_leaf_of_both_models_and_an_output_in_an_arguments_memory_count_once(monkeypatch):
    sizes = {"argument": 900_000_000, "output": 5000, "alias": 3000, "generated_code": 200}
    sizes = {f"{name}_size_in_bytes": size for name, size in (sizes | {"temp": 70_000}).items()}
    program = types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**sizes))
    monkeypatch.setattr(programs, "_compile", lambda *_: program)
    chip, options = CHIPS["v4"], Options(target="t5_1_1_small", drafts=("eagle",))
    total, table = 900_000_000 + 2000 + 200 + 70_000, 2 * 32_128 * 512
    # An EAGLE head has the target's embeddings.
    for draft, expected in ((None, total), ("eagle", total - table)):
        for capacity in (expected, expected - 1):
            memory = _Compiler(options, chip._replace(memory=capacity), mesh(1)).loop(draft)
            assert (memory.total, memory.temporaries) == (expected, 70_000)
            assert memory.arguments == expected - 72_200
            assert memory.fits == (expected <= capacity)


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_tied_embeddings_are_read_once_as_the_output_layer(weights):
    config = dataclasses.replace(CONFIG, logits_via_embedding=True)
    model = programs.abstract_model(config, mesh(1), weights)
    read = step_costs.weights_read(model, num_tokens=1)["token_embedder/embedding"]
    numbers = CONFIG.emb_dim * CONFIG.vocab_size
    # In int8 a token has one scale, in float32.
    expected = 2 * numbers if weights == "auto" else numbers + 4 * CONFIG.vocab_size
    assert step_costs.bytes_per_device(read) == expected


def test_the_command_prints_and_keeps_every_figure(monkeypatch, tmp_path, capsys):
    verified, verification = [], programs.verification

    def noted(*given):
        verified.append(given[-1])
        return verification(*given)

    monkeypatch.setattr(programs, "verification", noted)
    tiny = dataclasses.replace(CONFIG, vocab_size=256, num_decoder_layers=1)
    monkeypatch.setitem(sizes.SIZES, "tiny", tiny)
    monkeypatch.setattr(paper_tables, "DRAFTS", dict.fromkeys(("small", "base", "large"), "tiny"))
    monkeypatch.setattr(paper_tables, "TABLE_2", paper_tables.TABLE_2[-1:])
    monkeypatch.setattr(paper_tables, "TARGET", "tiny")
    path = tmp_path / "report.json"
    flags = "--target tiny --draft tiny --gamma 3 --batch 2 --source_len 24 --max_decode_len 15"
    flags += " --verifier token"
    assert main(["compile-tpu", *flags.split(), "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    lines = [re.sub(" +", " ", line) for line in printed.splitlines()]
    assert any(line.startswith("| plain | tiny | 1 |") for line in lines)
    assert any(line.startswith("| CNN/DM | large | 1 | 3 | 0.56 | 0.11 |") for line in lines)

    report = json.loads(path.read_text())
    (result,) = report["results"]
    assert len(result["table_2"]) == 1
    plain, speculative = result["loops"]
    assert plain["fits"] and speculative["fits"]
    # One model more, each parameter of two bytes.
    weights = 2 * sum(math.prod(shape) for shape in expected_shapes(tiny).values())
    assert speculative["arguments"] - plain["arguments"] == pytest.approx(weights, rel=0.02)
    assert verified == [TokenVerifier()]
    seconds = {(s["kind"], s["cost"]["new_tokens"]): s["seconds"] for s in result["steps"]}
    assert seconds.keys() == {("plain", 1), ("draft", 1), ("verification", 4)}
    (pair,) = (p for p in result["pairs"] if p["alpha"] == 0.8)
    # The draft is the target.
    assert pair["c"] == 1.0
    verification_cost = seconds["verification", 4] / seconds["plain", 1]
    assert pair["verification_cost"] == verification_cost
    assert pair["speed_up"] == wall_time_improvement(0.8, 3, 1.0, verification_cost)
    costs = ["3", "1.000", f"{verification_cost:.3f}"]
    shown = ["tiny", *costs, *(f"{each['speed_up']:.2f}" for each in result["pairs"])]
    assert f"| {' | '.join(shown)} |" in lines
    shapes = "batch 2, source 24, at most 15 tokens, gamma 3 (jax "
    assert lines[0].startswith(f"tiny in bfloat16 for TPU v4:2x2x1: {shapes}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--topology v4:9x9", "topology 'v4:9x9': libtpu says"),
        ("--topology v6e:9x9", "topology 'v6e:9x9': libtpu says"),
        ("--topology v6e-8", "topology 'v6e-8': give a chip (v4, v5e, v5p, v6e) and a layout"),
        ("--draft mt5_small", "draft mt5_small has 250112 tokens and target t5_1_1_xxl 32128"),
        ("--draft nothing", "the draft's size is 'nothing': choose one of t5_1_0_small, "),
        ("--draft copy", "t5gemma2_4b, int8, int4, eagle, eagle:WIDTH"),
        ("--draft eagle:4096", "width is 4096 and the target's 4096: give less"),
        ("--target t5gemma_2b_2b --draft eagle", "the target is a T5GemmaConfig and EAGLE heads"),
        ("--draft eagle:wide", "draft 'eagle:wide': give eagle, or eagle:WIDTH"),
        ("--mesh 1,8", "mesh 1,8 needs 8 chips and v4:2x2x1 has 4"),
        ("--mesh 1,3", "does not fit the places of the 3 chips: choose axes that divide each of"),
        ("--mesh 2,1", "batch 1 does not divide over 2 replicas: give a multiple of 2"),
        ("--mesh 4", "'4': give DATA,MODEL such as 1,4"),
        ("--gamma 0", "gamma is 0: give at least 1"),
        ("--widths 3,2", "widths are (3, 2) and verifier 'block': use multi or tree"),
        ("--verifier multi --widths 3,2", "widths are (3, 2): multi takes one number"),
        ("--verifier tree --widths 0", "tree widths are (0,): give at least 1"),
        ("--verifier tree --widths 9,9,9", "nodes: give at most 256"),
        ("--verifier tree --draft int4", "draft int4 proposes no trees: give a model or an"),
        ("--block_efficiency 3", "block efficiency is 3 and verifier 'block': give tree"),
        ("--verifier tree --block_efficiency 9", "block efficiency is 9: give 1 to 8, the most"),
        ("--verifier coupled", "--verifier is 'coupled': choose from token, block, multi, tree"),
        ("--json .", "argument --json: . is a folder: give a file"),
    ],
)
def test_mistakes_are_a_line_before_anything_is_compiled(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(programs, "_compile", None)
    try:
        status = main(["compile-tpu", *arguments.split()])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"libtpu is not installed: pip install 'spec_t5x\[tpu-compile\]'"),
        ("0.0.21.1", "libtpu is 0.0.21.1: pip install 'libtpu.*>=.*' in an environment without"),
    ],
)
def test_without_a_libtpu_that_compiles_the_remedy_is_named(found, message, monkeypatch):
    monkeypatch.setattr(tpu_chips, "version", lambda name: found)
    monkeypatch.setattr(requirements, "version", lambda name: found)
    with pytest.raises(InputError, match=f"topology 'v4:2x2x1': {message}"):
        tpu_chips.topology("v4:2x2x1")
