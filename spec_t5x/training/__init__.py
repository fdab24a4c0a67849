"""Training and distillation of T5 on text pairs; evaluation by loss and BLEU.

``run`` is the only module that knows gin.
"""
