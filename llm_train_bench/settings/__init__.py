"""Flags, checks, combinations, and the plan that they resolve to."""
