"""One run: launch, start, measured window, loop, profiling, failures, hangs."""
