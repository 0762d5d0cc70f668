"""Paged decode on Hopper."""
