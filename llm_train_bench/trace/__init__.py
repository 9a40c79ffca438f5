"""The time breakdown of a trace."""
