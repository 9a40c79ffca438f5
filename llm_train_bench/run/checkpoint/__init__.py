"""Saving what a run has learnt so that nothing loses it, and going on from there."""
