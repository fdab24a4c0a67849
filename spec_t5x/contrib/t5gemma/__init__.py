"""T5Gemma and T5Gemma 2: network, and checkpoints of Hugging Face and of the gemma library."""

from spec_t5x.registry import register

register("family", t5gemma="spec_t5x.contrib.t5gemma.network:FAMILY")
register(
    "format",
    t5gemma="spec_t5x.contrib.t5gemma.huggingface:FORMAT",
    gemma="spec_t5x.contrib.t5gemma.gemma_library:FORMAT",
)
