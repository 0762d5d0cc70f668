"""Gluon kernels for Hopper (sm_90), where they measurably beat the Triton ones."""
