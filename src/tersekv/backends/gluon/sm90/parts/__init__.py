"""Parts shared by Hopper kernels of several operations."""
