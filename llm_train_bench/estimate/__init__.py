"""Used only by estimate.py: estimates and plans."""
