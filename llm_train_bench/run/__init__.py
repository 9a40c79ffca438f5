"""One run's life: start, measured window, loop, profiling, failures, hangs, launch."""
