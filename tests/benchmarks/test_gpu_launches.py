"""The count of a GPU's kernels and launches: what is read of XLA's dump, and its absence."""

import jax
import pytest

from benchmarks import gpu_launches
from spec_t5x.contrib.gpu.kernels import SWITCH
from spec_t5x.contrib.gpu.operations import GPU
from spec_t5x.machine.operations import switch

# A loop that the host runs: its condition, a graph, two rounds of a loop of a graph and a copy.
BY_HOST = """\
000: kCommandBuffer [source       | next=302 (1)]
    001: kCustomKernel [source        | next=002 (1) ] fusion_1 grid: [1, 1, 1]
302: kWhile         [prev=000 (1) | next=982 (1)]
condition:
    303: kCustomKernel [source | sink] wrapped_not grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=529 (1)]
        304: kCustomKernel [source         | next=305 (1)] fusion_2 grid: [8, 1, 1]
        305: kCopy         [prev=304 (1)   | sink        ] kCopy
    529: kWhile         [prev=000 (1) | next=000 (1)]
condition:
        530: kCustomKernel [source | sink] fusion_3 grid: [1, 1, 1]
      body:
        000: kCommandBuffer      [source       | next=723 (1)]
            531: kCustomKernel [source       | next=532 (1)] fusion_4 grid: [1, 1, 1]
            532: kCustomKernel [source       | next=532 (1)] fusion_5 grid: [1, 1, 1]
        723: kDynamicSliceFusion [prev=000 (1) | next=734 (2)] params=1, results=1
            724: kCopy [source | sink] kCopy
""".splitlines()
# The same loops in one graph, and one of the encoder.
BY_GRAPH = """\
000: kCommandBuffer [source       | sink]
    001: kCustomKernel [source        | next=002 (1) ] fusion_1 grid: [1, 1, 1]
    002: kWhile         [prev=001 (1) | next=302 (1)]
      body:
        003: kCustomKernel [source       | sink] attention_in_parts grid: [1, 1, 1]
    302: kWhile         [prev=002 (1) | next=982 (1)]
      body:
        304: kCustomKernel [source         | next=305 (1)] fusion_2 grid: [8, 1, 1]
        529: kWhile         [prev=000 (1) | next=000 (1)]
          body:
            531: kCustomKernel [source       | next=532 (1)] fusion_4 grid: [1, 1, 1]
""".splitlines()


def test_launches_of_loops_that_the_host_runs():
    program = gpu_launches.thunks(BY_HOST)
    found = gpu_launches.counts(program, gamma=3)
    assert found["draft_step_kernels"] == 4
    assert found["iteration_kernels"] == 3 + 2 * 4
    # Condition and graph; and in both rounds condition, graph and copy.
    assert found["iteration_launches"] == 2 + 2 * 3
    assert program.launches == 1 and found["prefill_kernels"] == 1


def test_loops_in_a_graph_are_no_launches():
    program = gpu_launches.thunks(BY_GRAPH)
    found = gpu_launches.counts(program, gamma=3)
    assert (found["iteration_launches"], program.launches) == (0, 1)
    assert (found["draft_step_kernels"], found["iteration_kernels"]) == (1, 3)


@pytest.mark.parametrize(
    ("flags", "message"), [(["--gamma", "1"], "gamma is 1"), ([], "compiles for no GPU")]
)
def test_a_mistake_is_told_in_a_line(flags, message, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")

    def no_plugin(**options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(gpu_launches.topologies, "get_topology_desc", no_plugin)
    assert gpu_launches.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu_launches: error: ") and message in line
    assert jax.default_backend() == "cpu"


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("given", ["", "0", "1"])
def test_a_program_has_the_kernels_of_its_name_whatever_is_set(given, used, monkeypatch):
    monkeypatch.setenv(SWITCH, given)
    with gpu_launches.all_kernels(used):
        assert (switch(SWITCH) == "1", GPU.state()[0]) == (used, used)
    assert switch(SWITCH) == (given or None)
