"""Changes to a model or its data: attention, compilation, recomputation, precision, optimizer."""
