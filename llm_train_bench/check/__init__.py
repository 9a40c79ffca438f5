"""Whether a machine is as fast as it should be, and results that others can check."""
