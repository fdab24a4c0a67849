"""Training and distillation of T5s, language models and draft heads."""
