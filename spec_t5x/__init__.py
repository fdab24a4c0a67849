"""Lossless speculative decoding of encoder-decoder T5 models in JAX.

```python
from spec_t5x import Generator

generator = Generator.load("t5-target", "t5-draft")
for outputs in generator.generate(["translate English to German: Where is the station?"]):
    print(outputs[0].output)
```
"""

import importlib
from typing import Any

__version__ = "0.2.0"

# Module of each public name, imported at first use: importing JAX takes a second.
_LAZY = {
    "DraftOptions": "spec_t5x.drafts.kinds",
    "GenerateOptions": "spec_t5x.generation",
    "Generation": "spec_t5x.generation",
    "Generator": "spec_t5x.generation",
    "InputError": "spec_t5x.errors",
    "StreamEvent": "spec_t5x.generation",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
