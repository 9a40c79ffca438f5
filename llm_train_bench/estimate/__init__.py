"""Used only by estimate.py: estimates, plans, simulated steps, traced memory."""
