"""Many settings: the experiment, its grid, runs, the search for the fastest, largest batch."""
