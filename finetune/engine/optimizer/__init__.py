"""Precision and size of what the optimizer updates."""
