"""Readings of a device: step times, memory, power, clocks."""
