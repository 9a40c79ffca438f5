"""Used by all packages: errors, files, tables, the start of a process, the machine. Needs no torch."""
