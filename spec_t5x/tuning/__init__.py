"""Costs of speculation on this device, measured once and kept."""
