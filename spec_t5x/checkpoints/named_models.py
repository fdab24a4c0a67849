"""Names of the checkpoints that a run loads; imports no JAX, for ``--help``."""

import dataclasses

from spec_t5x import registry
from spec_t5x.errors import InputError, check_choice
from spec_t5x.names import AUTO, INT8, NO_DRAFT, WEIGHTS
from spec_t5x.options import option

DEFAULT_TARGET = "ende-target"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Checkpoints to load; the names are those of the command line and of gin."""

    target: str = option(
        DEFAULT_TARGET,
        "checkpoint whose output is wanted: a directory, OWNER/NAME on the Hugging Face Hub, or a "
        "packaged one",
        "NAME_OR_DIR",
    )
    draft: str | None = option(
        None,
        f"draft: a checkpoint, or one of {', '.join(registry.names('draft'))}, with :ARGUMENT; "
        f"{NO_DRAFT} is plain decoding (default: a packaged target's own small model)",
        "NAME_OR_DIR",
    )
    vocabulary: str | None = option(
        None,
        "vocabulary of a T5X checkpoint, which has none: a SentencePiece model, FILE:100 with 100 "
        "extra ids, bytes, tokenizer.json, or another checkpoint",
        "FILE",
    )
    task: str | None = option(
        None,
        "name of the decoding settings in the target's config.json (task_specific_params) "
        "(default: those of all tasks)",
        "NAME",
    )
    dtype: str = option(
        AUTO,
        "type that the networks compute in; auto is float32 on a CPU, else bfloat16",
        (AUTO, "float32", "bfloat16"),
    )
    weights: str = option(
        AUTO,
        "weights of the target; auto is the checkpoint's, the others round all matrices but tables "
        "of embeddings, which makes another model",
        WEIGHTS,
    )
    draft_weights: str = option(AUTO, "weights of a draft that is a model", WEIGHTS)
    draft_temperature: float | None = option(
        None, "temperature of the draft, with its own top_k and top_p (default: the target's)"
    )
    draft_top_k: int = option(0, "top_k of the draft")
    draft_top_p: float = option(0.0, "top_p of the draft")

    def __post_init__(self):
        # A gin file may bind anything.
        texts = {"target": str, "draft": str | None, "vocabulary": str | None, "task": str | None}
        for name, kind in texts.items():
            if not isinstance(value := getattr(self, name), kind):
                raise InputError(f"Models.{name} is {value!r}: give a text in quotes")
        for name in ("weights", "draft_weights"):
            check_choice(name, getattr(self, name), WEIGHTS)
        if self.draft_temperature is None and (self.draft_top_k or self.draft_top_p):
            raise InputError(
                f"draft_top_k is {self.draft_top_k} and draft_top_p {self.draft_top_p} without "
                "a draft_temperature: give it too"
            )

    def draft_options(self):
        """Returns the settings of the draft."""
        from spec_t5x.checkpoints.make_draft import DraftOptions
        from spec_t5x.sampling.distributions import sampling

        settings = None
        if self.draft_temperature is not None:
            settings = sampling(self.draft_temperature, self.draft_top_k, self.draft_top_p)
        return DraftOptions(settings=settings, dtype=self.dtype, weights=self.draft_weights)

    def draft_name(self) -> str | None:
        """Returns the draft's name or directory, None for plain decoding."""
        if self.draft:
            return None if self.draft == NO_DRAFT else self.draft
        from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS

        if self.target not in PACKAGED_DRAFTS:
            raise InputError(
                f"no --draft was given for --target {self.target}: give --draft {INT8}, which "
                f"needs no other model, a model of your own, or --draft {NO_DRAFT}"
            )
        return PACKAGED_DRAFTS[self.target].get("transformer", "copy")
