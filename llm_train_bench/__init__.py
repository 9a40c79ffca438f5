"""The benchmark around the model: a package per subject; imports run downward (docs/ARCHITECTURE.md)."""

__version__ = "0.2.0"
