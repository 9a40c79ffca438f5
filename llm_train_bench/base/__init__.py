"""What every room uses: errors, files, tables, the start of a process, the machine. No torch."""
