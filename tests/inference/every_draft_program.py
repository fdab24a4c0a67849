"""Program of ``tests/end_to_end/test_named_drafts.py``: ``spec-t5x infer`` on simulated devices
with each kind of draft. It prints the outputs and the number of compiled loops as JSON.
"""

import contextlib
import json
import sys
import tempfile
import traceback
from pathlib import Path

import jax

from spec_t5x.cli.main import main
from tests.named_drafts import SPREAD, named

# Names of the programs that were compiled or read from the cache.
compiled: list[str] = []


def infer(directory: Path, draft: str, flags: list[str]) -> list[list[int]] | str:
    """Returns each answer's token ids or, if the command fails, its traceback or exit status."""
    with tempfile.TemporaryDirectory() as output:
        models = ["--target", str(directory / "target"), "--draft", named(draft, directory)]
        try:
            # Keeps the command's figures out of this program's JSON.
            with contextlib.redirect_stdout(sys.stderr):
                status = main(["infer", *models, "--output_dir", output, *flags])
        except Exception:
            return traceback.format_exc()
        if status:
            return f"exit status {status}"
        lines = (Path(output) / "predictions.jsonl").read_text().splitlines()
    return [json.loads(line)["output_ids"] for line in lines]


def note(event: str, seconds: float, fun_name: str = "", **_) -> None:
    if event.endswith("backend_compile_duration"):
        compiled.append(fun_name)


def run(directory: Path, draft: str, flags: list[str]) -> dict:
    compiled.clear()
    tokens = infer(directory, draft, flags)
    return {"tokens": tokens, "bursts": sum("burst" in name for name in compiled)}


if __name__ == "__main__":
    # Compilation would take most of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.monitoring.register_event_duration_secs_listener(note)
    directory, *flags = sys.argv[1:]
    print(json.dumps({draft: run(Path(directory), draft, flags) for draft in SPREAD}))
