"""Flags, rules, and the plan that they resolve to."""
