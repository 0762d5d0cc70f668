"""tersekv inside other libraries."""
