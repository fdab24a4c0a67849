"""Folders that register themselves with the core, and may each be deleted."""
