"""Numbers in, numbers out: FLOPs, memory, speed, collectives, hardware. No torch, no flags."""
