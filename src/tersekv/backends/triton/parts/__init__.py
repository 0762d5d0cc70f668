"""Kernel parts of several operations: quantization (write side), dequantization and scheduling (read side)."""
