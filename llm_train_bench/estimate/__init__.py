"""What only estimate.py uses: estimates, plans, simulated steps, traced memory."""
