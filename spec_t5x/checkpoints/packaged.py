"""Models that ship with the package, by name; cheap to import."""

import os
from pathlib import Path

from spec_t5x.checkpoints.storage.files import CONFIG_NAME

PACKAGED_MODELS = Path(__file__).parents[1] / "pretrained"


def packaged_names() -> list[str]:
    """Names of the models that ship with the package."""
    if not PACKAGED_MODELS.is_dir():
        return []
    names = sorted(os.listdir(PACKAGED_MODELS))
    return [name for name in names if (PACKAGED_MODELS / name / CONFIG_NAME).is_file()]
