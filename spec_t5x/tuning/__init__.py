"""Tuning by itself: what speculation costs and brings on this device, and the best setting."""
