"""Options that select a run's checkpoints, in a module without JAX, so that --help is fast."""

import dataclasses

from spec_t5x import registry
from spec_t5x.errors import InputError, check_choice, check_unused
from spec_t5x.names import AUTO, DTYPES, INT8, KV, NO_DRAFT, WEIGHTS
from spec_t5x.options import check_types, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Checkpoints to load and their precision; flags and gin bindings have the fields' names."""

    target: str = option(
        "t5-target",
        "checkpoint of the target: a directory, OWNER/NAME on the Hugging Face Hub, or the name of "
        "a packaged one",
        "NAME_OR_DIR",
    )
    draft: str | None = option(
        None,
        f"draft: a checkpoint, or one of {', '.join(registry.names('draft'))}, or NAME:ARGUMENT; "
        f"{NO_DRAFT} decodes without a draft (default: the draft packaged with the target)",
        "NAME_OR_DIR",
    )
    vocabulary: str | None = option(
        None,
        "vocabulary for a checkpoint without one (T5X): a SentencePiece model, FILE:100 with 100 "
        "extra ids, bytes, tokenizer.json, or another checkpoint",
        "FILE",
    )
    task: str | None = option(
        None,
        "task whose decoding settings are used, of task_specific_params in the target's "
        "config.json (default: the settings for all tasks)",
        "NAME",
    )
    dtype: str = option(
        AUTO,
        "type that the networks compute in; auto is float32 on a CPU or a GPU before Ampere, else "
        "bfloat16",
        DTYPES,
    )
    weights: str = option(
        AUTO,
        "precision of the target's weights; auto is the checkpoint's, int8 and int4 round all "
        "matrices but those for the look-up of embeddings, which changes the model",
        WEIGHTS,
    )
    kv: str = option(
        AUTO,
        "type of the source's keys and values in the target's cache; auto is dtype, int8 rounds "
        "them, which changes the model",
        KV,
    )
    draft_weights: str = option(AUTO, "precision of a draft model's weights", WEIGHTS)
    draft_temperature: float | None = option(
        None, "temperature of the draft, with draft_top_k and draft_top_p (default: as the target)"
    )
    draft_top_k: int = option(0, "top_k of the draft, with draft_temperature")
    draft_top_p: float = option(0.0, "top_p of the draft, with draft_temperature")

    def __post_init__(self):
        check_types(self)
        for name, known in {"weights": WEIGHTS, "draft_weights": WEIGHTS, "kv": KV}.items():
            check_choice(name, getattr(self, name), known)
        for name in ("target", "draft", "vocabulary", "task"):
            if getattr(self, name) == "":
                raise InputError(f"{name} is '': give a name, or leave it out")
        if not self.draft_temperature and (self.draft_top_k or self.draft_top_p):
            raise InputError(
                f"draft_top_k is {self.draft_top_k}, draft_top_p {self.draft_top_p} and "
                f"draft_temperature {self.draft_temperature}: give a draft_temperature above 0"
            )
        if self.draft == NO_DRAFT:
            check_unused(self, "there is no draft", "draft_weights", "draft_temperature")
        if self.draft_temperature is not None:
            self.draft_options()

    def draft_options(self):
        """Returns the draft's ``DraftOptions``: sampling settings, dtype and weights."""
        from spec_t5x.drafts.kinds import DraftOptions
        from spec_t5x.sampling.distributions import sampling

        settings = None
        if self.draft_temperature is not None:
            filters = self.draft_top_k, self.draft_top_p
            settings = sampling(self.draft_temperature, *filters, prefix="draft_")
        return DraftOptions(settings=settings, dtype=self.dtype, weights=self.draft_weights)

    def draft_name(self) -> str | None:
        """Returns the draft, given or packaged (else ``InputError``); None for plain decoding."""
        if self.draft:
            return None if self.draft == NO_DRAFT else self.draft
        from spec_t5x.checkpoints.loading import find, is_on_hub
        from spec_t5x.checkpoints.make_draft import packaged_drafts

        drafts = {} if is_on_hub(self.target) else packaged_drafts(find(self.target))
        if not drafts:
            raise InputError(
                f"no draft is packaged for target {self.target}: give draft {INT8}, which needs no "
                f"other model, the name of a smaller model, or {NO_DRAFT} for plain decoding"
            )
        return next(iter(drafts.values()))
