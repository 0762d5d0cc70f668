"""Paged decode in Triton."""
