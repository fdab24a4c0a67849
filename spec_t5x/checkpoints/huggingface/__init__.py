"""Checkpoints of Hugging Face: T5, mT5, ByT5 and FLAN-T5."""
