"""Kernels for Hopper, a folder for each operation."""
