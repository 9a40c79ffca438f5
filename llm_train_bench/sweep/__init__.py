"""Many settings: the experiment, its grid, runs, ranking, largest batch."""
