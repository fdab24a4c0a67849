"""Training and distillation of drafts and draft heads by T5X's trainer."""
