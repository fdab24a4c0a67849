"""Cascades: a draft that is itself sped up by a cheaper one."""

from spec_t5x.registry import register

register("draft", cascade="spec_t5x.contrib.cascade.draft:KIND")
