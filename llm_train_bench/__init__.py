"""The machinery around the model: one room a subject, imports run downward (docs/ARCHITECTURE.md)."""

__version__ = "0.2.0"
