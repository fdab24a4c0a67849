"""Models of ``tests.generation`` that tests of benchmarks compare, and their outputs."""

from tests.generation.conftest import generator, greedy_alone  # noqa: F401
