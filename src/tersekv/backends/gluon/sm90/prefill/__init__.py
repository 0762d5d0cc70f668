"""Prefill of keys and values for Hopper: query rows in blocks of 128, keys and values brought by a warp of its own."""
