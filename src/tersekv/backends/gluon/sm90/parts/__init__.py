"""What kernels of several operations share on Hopper."""
