"""Saving and resuming a run."""
