"""Readings taken off a device: step times, memory, power, clocks."""
