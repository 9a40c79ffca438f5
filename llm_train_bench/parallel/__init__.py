"""Several ranks: joining them, the device mesh, DDP, FSDP."""
