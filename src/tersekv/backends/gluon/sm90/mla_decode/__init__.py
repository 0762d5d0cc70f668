"""Paged MLA decode on Hopper."""
