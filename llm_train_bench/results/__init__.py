"""A result: schema, files, metrics, and output."""
