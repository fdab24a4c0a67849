"""Models that ship with the package, by name; the module is cheap to import."""

from pathlib import Path

from spec_t5x.checkpoints.storage.files import CONFIG_NAME

PACKAGED_MODELS = Path(__file__).parents[1] / "pretrained"


def packaged_names() -> list[str]:
    """Lists the names of the packaged models, sorted: directories of ``PACKAGED_MODELS``."""
    return sorted(path.parent.name for path in PACKAGED_MODELS.glob(f"*/{CONFIG_NAME}"))
