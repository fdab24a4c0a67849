"""Which checkpoints a run loads, by their names; cheap to import."""

import dataclasses

from spec_t5x.errors import InputError, check_choice
from spec_t5x.names import AUTO, INT8, NO_DRAFT, WEIGHTS

DEFAULT_TARGET = "ende-target"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Which checkpoints to load; names as on the command line."""

    target: str = DEFAULT_TARGET
    # None is the packaged target's own, "none" is plain decoding.
    draft: str | None = None
    # Of a target that holds none, as T5X checkpoints.
    vocabulary: str | None = None
    # The task whose decoding settings the target's checkpoint is taken with
    # (``task_specific_params``); None takes those that it has for all.
    task: str | None = None
    # What the networks compute in; "auto" is the fast type of the platform.
    dtype: str = "auto"
    # The target's and the draft's: "auto" is what the checkpoint has, at the width that it needs;
    # "int8" and "int4" round all matrices but tables of embeddings, which makes another model,
    # close to the first one.
    weights: str = AUTO
    draft_weights: str = AUTO
    # How the draft samples; None takes the target's temperature, top_k and top_p.
    draft_temperature: float | None = None
    draft_top_k: int = 0
    draft_top_p: float = 0.0

    def __post_init__(self):
        # gin hands over whatever a file binds.
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
        """Settings of the draft."""
        from spec_t5x.checkpoints.make_draft import DraftOptions
        from spec_t5x.sampling.distributions import sampling

        temperature = self.draft_temperature
        own = (temperature, self.draft_top_k, self.draft_top_p)
        return DraftOptions(
            settings=None if temperature is None else sampling(*own),
            dtype=self.dtype,
            weights=self.draft_weights,
        )

    def draft_name(self) -> str | None:
        """The draft's name or directory, None for plain decoding."""
        if self.draft == NO_DRAFT:
            return None
        if self.draft:
            return self.draft
        from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS

        if self.target not in PACKAGED_DRAFTS:
            raise InputError(
                f"no --draft was given for --target {self.target}: give --draft {INT8}, which "
                f"needs no other model, a model of your own, or --draft {NO_DRAFT}"
            )
        return PACKAGED_DRAFTS[self.target].get("transformer", "copy")
