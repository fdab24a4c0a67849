"""Adds the folders of the examples, which are not installed, to Python's search path."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "corrections")]
