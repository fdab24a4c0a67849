"""Decoding loops over any ``Target`` and ``Draft``: speculative (Algorithm 1) and plain."""
