"""Many settings: the experiment, its grid, their runs, the ranking, the largest batch."""
