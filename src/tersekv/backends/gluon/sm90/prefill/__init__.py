"""Prefill attention for Hopper: work tiles of 128 query rows; a producer warp copies keys and values by TMA."""
