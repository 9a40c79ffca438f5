"""The machinery around a training step: arguments, data, the measured loop, results."""
