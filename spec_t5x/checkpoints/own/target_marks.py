"""By what a draft that builds on a target's parameters knows its target again."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.checkpoints.storage.loaded_model import LoadedModel
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.errors import InputError


def target_marks(target: LoadedModel) -> dict[str, str]:
    """What a draft's config.json keeps of its target."""
    return {
        "vocabulary": target.vocabulary.fingerprint(),
        "fingerprint": target_fingerprint(target),
    }


def target_fingerprint(target: LoadedModel) -> str:
    """A hash that tells trained targets apart, whatever type they were loaded as.

    Of the scale of the decoder's last norm, which all training changes; in bfloat16, the
    coarsest type that models are stored and loaded in.
    """
    scale = np.asarray(_last_scale(target))
    return hashlib.sha256(scale.astype(jnp.bfloat16).tobytes()).hexdigest()


def _last_scale(target: LoadedModel) -> Any:
    return target.params["decoder"]["decoder_norm"]["scale"]


def _is_known(values: Any) -> bool:
    """Whether this process can read them: no shapes, not traced, not on other hosts."""
    if isinstance(values, jax.ShapeDtypeStruct | jax.core.Tracer):
        return False
    if isinstance(values, jax.Array):
        return values.is_fully_addressable or values.is_fully_replicated
    return True


def check_belongs(
    what: str,
    directory: Location,
    metadata: dict[str, Any],
    target: LoadedModel,
    sizes: dict[str, tuple[int, int]],
) -> None:
    """Refuses a draft of another target.

    Parameters are compared where there are any to be read: a program's trace has none.

    Args:
        what: it is, such as "heads".
        directory: where it was read from.
        metadata: its config.json.
        target: the model that will verify it.
        sizes: by what they are of, the draft's number and the target's.

    Raises:
        InputError: they differ, or vocabulary or target are not those of the marks.
    """
    marks = metadata.get("target")
    marks = marks if isinstance(marks, dict) else {}
    pairs = sizes | {"vocabulary": (marks.get("vocabulary"), target.vocabulary.fingerprint())}
    if _is_known(_last_scale(target)):
        pairs["decoder"] = (marks.get("fingerprint"), target_fingerprint(target))
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise InputError(
                f"{what} {directory} are for {name} {_short(ours)} and target "
                f"{target.directory} has {_short(theirs)}: give {what} that were trained for "
                "this target"
            )


def _short(mark: Any) -> str:
    """Hashes as git shows them."""
    return mark[:12] if isinstance(mark, str) else str(mark)
