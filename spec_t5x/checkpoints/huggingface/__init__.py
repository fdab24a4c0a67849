"""Checkpoints of Hugging Face: T5, mT5, ByT5, FLAN-T5 and GPT-2."""
