"""Reading a trace and saying where the time went."""
