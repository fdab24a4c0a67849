"""Measurements of speed-ups, acceptance rates and quality."""
