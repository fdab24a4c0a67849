"""Training and distillation of T5 on text pairs; evaluation by loss and BLEU.

``run`` and ``run_heads`` are the only modules that know gin.
"""
