"""The machinery around the model: one room a subject, imports run downward (docs/ARCHITECTURE.md)."""
