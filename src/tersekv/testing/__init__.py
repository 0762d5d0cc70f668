"""Shipped test tools, so that users can verify their own machine: cases, makers, comparisons."""
