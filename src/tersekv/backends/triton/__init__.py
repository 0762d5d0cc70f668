"""Portable GPU kernels in Triton, right on any NVIDIA GPU from SM80."""
