"""The packaged models: what they are, how they are measured, and their cards.

    python -m spec_t5x.experiments.packaging save ende-target runs/target_more/model --steps 6200
    python -m spec_t5x.experiments.packaging measure --data data ende-target ende-draft
    python -m spec_t5x.experiments.packaging check --data data

``save`` takes over what a training exported (``--steps``: of all its parts, where it was
trained in several), ``measure`` runs the commands of a card and
writes the card with their figures, ``check`` runs them again and compares. ``data`` holds the
folders ``ende`` and ``summarize``.
"""
