"""Functions of numbers: FLOPs, memory, speed, collectives. No torch, no files, no flags."""
