"""T5X's programs as gin files name them: a launch runs most as ``__main__``, and none runs here."""

import gin

for _name in ("train", "precompile", "infer", "evaluate"):
    gin.external_configurable(lambda **_: None, _name, module="__main__")
# The module of these needs TensorFlow Serving.
for _name in ("save", "create_inference_function"):
    gin.external_configurable(lambda **_: None, _name, module="export_lib")
