"""A result: its schema, its files, its figures, and how they are shown."""
