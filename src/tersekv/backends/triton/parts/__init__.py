"""What kernels of several operations share: rows and codes of the write side, tiles of the read side."""
