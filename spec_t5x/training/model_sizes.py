"""``T5Config`` as gin binds it: a published size by its name, and values that differ from it."""

import dataclasses

import gin

from spec_t5x.models.sizes import size as published_size
from spec_t5x.models.t5 import T5Config, check_names


@gin.configurable("T5Config", module="spec_t5x")
def t5_config(size: str = "t5_1_0_small", **changes) -> T5Config:
    """A published size, with the fields of ``T5Config`` that gin binds in place of its own.

    Raises:
        InputError: no such size, or no such field.
    """
    config = published_size(size)
    check_names(T5Config, changes, "T5")
    return dataclasses.replace(config, **changes)
