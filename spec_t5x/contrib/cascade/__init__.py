"""Cascades: a draft model that itself decodes speculatively, with a cheaper draft."""

from spec_t5x.registry import register

register("draft", cascade="spec_t5x.contrib.cascade.draft:KIND")
