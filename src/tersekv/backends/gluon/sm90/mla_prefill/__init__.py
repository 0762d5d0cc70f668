"""MLA prefill on Hopper."""
