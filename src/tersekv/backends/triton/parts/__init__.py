"""Kernel parts of several operations: quantisation (write side), dequantisation and scheduling (read side)."""
