"""Paged prefill in Triton."""
