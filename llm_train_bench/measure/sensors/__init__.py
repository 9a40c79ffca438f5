"""Power and clock sensors of NVIDIA and AMD GPUs."""
