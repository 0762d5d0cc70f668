"""Portable GPU kernels in Triton, for any NVIDIA GPU from SM80."""
